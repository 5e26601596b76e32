// What the codec, and what reads and writes layouts, says of a packet, whatever its bytes are; for programs that ask
// it.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "answer.h"
#include "place.h"
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
  std::string wrong;
  if (!wire::check_layout(packed, most, &wrong)) return {wrong.empty() ? "no reason" : wrong, ""};
  List<List<wire::Tensor>> layout;
  Reader reader(packed);
  layout.read(reader);
  Writer writer;
  write(writer, layout);
  return {wrong, std::string(writer.bytes())};
}

// The answer to a batch of so many requests, or for 0 a response that comes apart from it: the number of its blocks,
// the size of each, both in one byte, and the layout.
Told told_of_answer(std::string_view packet, size_t requests) {
  static const std::vector<std::string> names = {"Y", "Z", "STRINGS"};
  static AnswerLayout answer(names);  // used again, as by its owner
  size_t count = packet.empty() ? 0 : static_cast<uint8_t>(packet[0]) % 16;
  packet.remove_prefix(std::min<size_t>(1, packet.size()));
  std::vector<wire::Block> blocks;
  for (count = std::min(count, packet.size()); blocks.size() < count;) {
    blocks.push_back({1, 0, static_cast<uint8_t>(packet[blocks.size()])});
  }
  const Raw layout{packet.substr(count)};
  const std::vector<wire::Place> places;
  Writer message;
  std::string wrong;
  if (requests == 0) {
    const auto row = [&](Writer& writer) {
      writer.array(1);
      writer.array(6);
      write_all(writer, 1u, 0u, wire::kFinal, blocks, layout, std::nullopt);
    };
    wire::encode<wire::Kind::RESPONSES>(message, row);
    const auto decoded = decode(wire::kControl, wire::Side::STUB, message.bytes());
    if (!decoded) std::abort();
    answer.read(*wire::Responses(decoded.fields).responses.begin(), &wrong);
  } else {
    wire::encode<wire::Kind::ANSWER>(message, 1u, wire::kNoCore, places, places, blocks, layout, std::nullopt,
                                     std::nullopt);
    const auto decoded = decode(wire::kWork, wire::Side::STUB, message.bytes());
    if (!decoded) std::abort();
    answer.read(wire::Answer(decoded.fields), 1, requests, &wrong);
  }
  if (!wrong.empty()) return {wrong, ""};
  Writer writer;
  writer.array(answer.responses());
  for (size_t i = 0; i < answer.responses(); ++i) {
    writer.array(answer.first(i + 1) - answer.first(i));
    for (size_t each = answer.first(i); each < answer.first(i + 1); ++each) {
      const OutputLayout& output = answer.outputs()[each];
      writer.array(2);
      write_tensor(writer, answer.name(output), output.datatype, answer.shape(output), output.dims, output.block,
                   output.offset, output.size);
      writer.uint(output.elements);
    }
  }
  return {"", std::string(writer.bytes())};
}

// The size of the first block of a batch, and its layout, which is given but for the offsets in that block.
Told told_of_place(std::string_view packed) {
  std::string wrong;
  if (!wire::check_layout(packed, kMaxValues, &wrong)) return {wrong, ""};
  List<List<wire::Tensor>> layout;
  Reader reader(packed);
  layout.read(reader);
  std::vector<uint32_t> counts;
  std::vector<PlacedTensor> tensors;
  std::deque<std::vector<int64_t>> shapes;
  for (const List<wire::Tensor>& rows : layout) {
    counts.push_back(rows.size());
    for (const wire::Tensor& row : rows) {
      std::vector<int64_t>& shape = shapes.emplace_back();
      for (const uint64_t dimension : row.shape) shape.push_back(static_cast<int64_t>(dimension));
      const uint64_t offset = row.block == 0 ? 7 : row.offset;
      tensors.push_back({row.index, row.datatype, shape.data(), shape.size(), row.size, row.block, offset});
    }
  }
  uint64_t size;
  if (!place(counts, tensors, &size)) return {"it is too large", ""};
  Writer placed, writer;
  write_layout(placed, counts, tensors);
  writer.array(2);
  write_all(writer, size, Raw{placed.bytes()});
  return {"", std::string(writer.bytes())};
}

Told told_of_strings(std::string_view bytes, uint64_t count) {
  if (is_strings(bytes.data(), bytes.size(), count)) return {"", "\x90"};
  return {"it is not so many strings", ""};
}

// The channel: work, control, calls or launcher; or one of what comes in them. There the sender is a number: of the
// values that a layout may have, 0 for as many as any, of requests, or of strings.
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
    case 4:
      return told_of_layout(packet, sender == 0 ? kMaxValues : sender);
    case 5:
      return told_of_answer(packet, sender);
    case 6:
      return told_of_place(packet);
    default:
      return told_of_strings(packet, sender);
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
