// Says of each packet on its standard input why the codec refuses it, or writes it again.
//
// Input: the channel, the side that sent it, the packet's size (four bytes, the lowest first), the packet.
// Output: for each packet two texts, each with its size before it: the reason, and the packet as it was read.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "wire.h"

using namespace moonpool;

namespace {

// Read by its struct, for what the library is sent; checked for what it sends.
template <auto kind, class Message>
std::string by_struct(Reader fields) {
  Writer writer;
  writer.array(1 + wire::field_count(kind));
  writer.uint(static_cast<uint64_t>(kind));
  Message(fields).write(writer);
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

void put(std::string_view text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::fwrite(&size, sizeof size, 1, stdout);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

template <class Table>
void answer(const Table& table, uint8_t side, std::string_view packet) {
  const auto decoded = decode(table, side, packet);
  if (!decoded) {
    // Whatever it is, reading it stays within it.
    for (const Message& message : table.messages) {
      by_struct(static_cast<typename Table::Kind>(message.kind), Reader(packet));
    }
    Reader(packet).skip();
    put(decoded.wrong.empty() ? "no reason" : decoded.wrong);
    put("");
    return;
  }
  const std::string again = by_value(packet);
  const std::string read = by_struct(decoded.kind(), decoded.fields);
  if (!read.empty() && read != again) std::abort();
  put(decoded.wrong);
  put(again);
}

void answer_layout(std::string_view packed, uint64_t most) {
  wire::Layout layout;
  std::string wrong;
  if (!wire::read_layout(packed, most, &layout, &wrong)) {
    put(wrong.empty() ? "no reason" : wrong);
    put("");
    return;
  }
  Writer writer;
  write(writer, layout);
  put(wrong);
  put(writer.bytes());
}

}  // namespace

int main() {
  unsigned char head[6];
  while (std::fread(head, sizeof head, 1, stdin) == 1) {
    const size_t size = head[2] | head[3] << 8 | head[4] << 16 | static_cast<size_t>(head[5]) << 24;
    // Of exactly that size, so that a look beyond is seen.
    const std::unique_ptr<char[]> packet(new char[size]);
    if (std::fread(packet.get(), 1, size, stdin) != size) return 1;
    const std::string_view bytes(packet.get(), size);
    switch (head[0]) {
      case 0:
        answer(wire::kWork, head[1], bytes);
        break;
      case 1:
        answer(wire::kControl, head[1], bytes);
        break;
      case 2:
        answer(wire::kCalls, head[1], bytes);
        break;
      case 3:
        answer(wire::kLauncher, head[1], bytes);
        break;
      default:
        answer_layout(bytes, head[1] == 0 ? kMaxValues : head[1]);
    }
  }
  return 0;
}
