// What the codec says of a packet, whatever its bytes are; for programs that ask it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "wire.h"

// What the library reads and never writes.
namespace moonpool {

inline void write(Writer& writer, const Value& value) {
  switch (value.form) {
    case Form::kFlag:
      return writer.flag(value.number != 0);
    case Form::kUint:
      return writer.uint(value.number);
    case Form::kNegative:
      return writer.integer(static_cast<int64_t>(value.number));
    case Form::kReal:
      return writer.real(value.real);
    case Form::kText:
      return writer.text(value.bytes);
    case Form::kRaw:
      return writer.raw(value.bytes);
    case Form::kArray:
      return writer.array(value.number);
    case Form::kMap:
      return writer.map(value.number);
    case Form::kNil:
    case Form::kBad:
      return writer.nil();
  }
}
template <class T>
void write(Writer& writer, const std::optional<T>& value) {
  if (value) {
    write(writer, *value);
  } else {
    writer.nil();
  }
}
template <class T>
void write(Writer& writer, const List<T>& values) {
  writer.array(values.size());
  for (const T& value : values) write(writer, value);
}
inline void write(Writer& writer, const Entries& entries) {
  writer.map(entries.size());
  for (const Entry& entry : entries) write_all(writer, entry.name, entry.value);
}
#include "writers.inc"

}  // namespace moonpool

using namespace moonpool;

namespace {

// Why it refuses the packet, or the packet as it was read, written again.
struct Told {
  std::string refused, again;
};

// Read by its struct, for what the library is sent; checked for what it sends.
template <auto kind, class Message>
std::string by_struct(Reader fields) {
  Writer writer;
  writer.array(1 + wire::field_count(kind));
  writer.uint(static_cast<uint64_t>(kind));
  write_fields(writer, Message(fields));
  return std::string(writer.bytes());
}

template <class Kind>
std::string by_struct(Kind kind, Reader fields);
#include "structs.inc"

// Value by value.
std::string by_value(std::string_view packet) {
  Reader reader(packet);
  Writer writer;
  while (!reader.at_end()) write(writer, reader.next());
  return std::string(writer.bytes());
}

template <class Table>
Told told_of(const Table& table, uint8_t sender, std::string_view packet) {
  const auto decoded = decode(table, sender, packet);
  if (!decoded) {
    // Whatever it is, reading it stays within it.
    for (const Message& message : table.messages) {
      by_struct(static_cast<typename Table::Kind>(message.kind), Reader(packet));
    }
    Reader(packet).skip();
    return {decoded.wrong.empty() ? "no reason" : decoded.wrong, ""};
  }
  const std::string again = by_value(packet);
  const std::string read = by_struct(decoded.kind(), decoded.fields);
  if (!read.empty() && read != again) std::abort();
  return {decoded.wrong, again};
}

Told told_of_layout(std::string_view packed, uint64_t most) {
  wire::Layout layout;
  std::string wrong;
  if (!wire::read_layout(packed, most, &layout, &wrong)) {
    return {wrong.empty() ? "no reason" : wrong, ""};
  }
  Writer writer;
  write(writer, layout);
  return {wrong, std::string(writer.bytes())};
}

// The channel: work, control, calls or launcher; any other one: a layout of so many values, 0 for as many as any.
Told told_of(uint8_t channel, uint8_t sender, std::string_view packet) {
  switch (channel) {
    case 0:
      return told_of(wire::kWork, sender, packet);
    case 1:
      return told_of(wire::kControl, sender, packet);
    case 2:
      return told_of(wire::kCalls, sender, packet);
    case 3:
      return told_of(wire::kLauncher, sender, packet);
    default:
      return told_of_layout(packet, sender == 0 ? kMaxValues : sender);
  }
}

// A packet with its channel and its sender, read from `file`: both, the size (four bytes, the lowest first), the bytes.
struct Packet {
  uint8_t channel = 0, sender = 0;
  std::string bytes;

  // False at the end of the file.
  bool read(std::FILE* file) {
    unsigned char head[6];
    if (std::fread(head, sizeof head, 1, file) != 1) return false;
    channel = head[0];
    sender = head[1];
    bytes.resize(head[2] | head[3] << 8 | head[4] << 16 | static_cast<size_t>(head[5]) << 24);
    return std::fread(bytes.data(), 1, bytes.size(), file) == bytes.size();
  }

  Told told() const {
    // Of exactly that size, so that a look beyond is seen.
    const std::unique_ptr<char[]> copy(new char[bytes.size()]);
    bytes.copy(copy.get(), bytes.size());
    return told_of(channel, sender, std::string_view(copy.get(), bytes.size()));
  }
};

// A text with its size before it.
void put(std::string_view text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::fwrite(&size, sizeof size, 1, stdout);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace
