// What an end of a work channel does in C++ with whole messages, on top of `place.h` and `answer.h`.
#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "answer.h"
#include "codec.h"
#include "wire.h"

namespace moonpool {

// Returns the size of the block for so many bytes: `block_bytes` in ipc/arena.py, which says why.
inline uint64_t block_bytes(uint64_t size) {
  uint64_t units = size == 0 ? 1 : (size + wire::kAlignment - 1) / wire::kAlignment;
  if (size > wire::kLargestClass) return units * wire::kAlignment;
  unsigned shift = 0;
  while (units >> shift >= 8) ++shift;
  units = ((units + (uint64_t{1} << shift) - 1) >> shift) << shift;
  return units * wire::kAlignment;
}

// The answer to a batch that has nothing but outputs.
class PlainAnswer {
 public:
  // Reads a packet of the stub. Returns false for any other message, and for one that breaks the protocol.
  bool read(std::string_view packet, uint64_t batch, size_t requests, AnswerLayout& layout) {
    try {
      const auto decoded = decode(wire::kWork, wire::Side::STUB, packet);
      if (!decoded || decoded.kind() != wire::Kind::ANSWER) return false;
      const wire::Answer said(decoded.fields);
      if (!said.held.empty() || !said.released.empty() || said.remarks || said.states) return false;
      std::string wrong;
      if (!layout.read(said, batch, requests, &wrong)) return false;
      core = said.core;
      blocks.clear();
      for (const wire::Block& block : said.blocks) blocks.push_back(block);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  uint64_t core = wire::kNoCore;
  std::vector<wire::Block> blocks;
};

// Reads a response that comes apart from the answer and lies in one block. Returns false if it breaks the protocol.
// `room` is reused.
inline bool read_apart(Writer& room, const wire::Block& block, std::string_view packed, AnswerLayout& layout) {
  try {
    room.clear();
    room.array(6);
    const auto blocks = [&block](Writer& writer) {
      writer.array(1);
      block.write(writer);
    };
    write_all(room, 0u, 0u, 0u, blocks, Raw{packed}, std::nullopt);
    Reader reader(room.bytes());
    wire::Response said;
    said.read(reader);
    std::string wrong;
    return layout.read(said, &wrong);
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace moonpool
