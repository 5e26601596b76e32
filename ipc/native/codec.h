// Checks whole messages against the tables in wire.h, so that reading them afterwards cannot fail.
//
// It refuses every message that Python's codec refuses, with the same words if they name the wrong field.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "msgpack.h"

namespace moonpool {

enum class Type : uint8_t { kInt, kReal, kText, kRaw, kFlag, kTable, kList, kRow, kOneOf };

// The allowed values of a field. The specs of its parts follow one another in the same array.
struct Spec {
  const char* name;  // "" for the item of a list and for an alternative
  Type type;
  bool maybe;  // nil is allowed, too
  uint16_t first;
  uint16_t count;
  int64_t low;    // of an int
  uint64_t high;  // of an int; the greatest length of other values
};

// A row of the tables of messages.
struct Message {
  const char* name;
  uint8_t kind;
  uint8_t sender;  // a side; 0 for either
  uint16_t first;
  uint16_t count;
};

// The messages of one channel.
template <class K, size_t N>
struct Table {
  using Kind = K;
  std::array<Message, N> messages;
  const Spec* specs;
};

// The most values in a message, nested ones included.
constexpr uint64_t kMaxValues = uint64_t{1} << 21;

// A message that was accepted, or why it was not.
template <class Kind>
struct Decoded {
  const Message* message = nullptr;
  Reader fields;      // behind the kind; points into the packet
  std::string wrong;  // the reason, without a full stop; empty if the message was accepted

  explicit operator bool() const { return message != nullptr; }
  Kind kind() const { return static_cast<Kind>(message->kind); }
};

// Decodes a packet that must be one of these messages and the peer's to send. Else the result is false, and `wrong`
// says why.
const Message* check_message(const Message* messages, size_t count, const Spec* specs, uint8_t peer,
                             std::string_view packet, Reader* fields, std::string* wrong);

// Returns true if the bytes are one value that the spec allows, with at most so many values in it; else `wrong` says
// why.
bool check_packed(const Spec* specs, const Spec& spec, std::string_view packed, uint64_t most, std::string* wrong);

template <class Table, class Side>
Decoded<typename Table::Kind> decode(const Table& table, Side peer, std::string_view packet) {
  Decoded<typename Table::Kind> decoded;
  decoded.message = check_message(table.messages.data(), table.messages.size(), table.specs, static_cast<uint8_t>(peer),
                                  packet, &decoded.fields, &decoded.wrong);
  return decoded;
}

}  // namespace moonpool
