// What an end of a work channel does in C++ with whole messages, on top of `place.h` and `answer.h`.
#pragma once

#include <cstdint>
#include <new>
#include <optional>
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

// An EXECUTE.
class PlainBatch {
 public:
  // Reads a packet of the runtime, for a model with so many inputs. Returns false for any other message, and for one
  // that breaks the protocol.
  bool read(std::string_view packet, size_t names) {
    try {
      const auto decoded = decode(wire::kWork, wire::Side::RUNTIME, packet);
      if (!decoded || decoded.kind() != wire::Kind::EXECUTE) return false;
      Reader reader = decoded.fields;
      List<wire::Place> places;
      List<wire::Block> lent;
      Raw layout;
      read_all(reader, batch, core, places, lent, layout);
      released.clear();
      for (const wire::Place& place : places) released.push_back(place);
      blocks.clear();
      for (const wire::Block& block : lent) blocks.push_back(block);
      return read_layout(layout.bytes, names) && read_details(reader) && read_targets(reader);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  size_t requests() const { return firsts.size() - 1; }
  const int64_t* shape(const OutputLayout& input) const { return dims.data() + input.first_dim; }

  uint64_t batch = 0, core = wire::kNoCore;
  std::vector<wire::Place> released;
  std::vector<wire::Block> blocks;
  // The inputs of a request are those from its place in `firsts` to the next one. Each lies within its block.
  std::vector<OutputLayout> inputs;
  std::vector<size_t> firsts;
  std::vector<int64_t> dims;
  // The details of each request, within the packet; none if no request has any. One without details has no bytes.
  struct Details {
    std::string_view packed;
    // They say more than what a model asks its request for.
    bool is_rare = false;
  };
  std::vector<Details> details;
  // Where outputs go in memory of clients.
  std::vector<wire::Target> targets;

 private:
  bool read_layout(std::string_view packed, size_t names) {
    std::string wrong;
    inputs.clear();
    dims.clear();
    firsts.assign(1, 0);
    if (!wire::check_layout(packed, kMaxValues, &wrong)) return false;
    Reader reader(packed);
    for (uint32_t left = reader.array(); left > 0; --left) {
      for (uint32_t rows = reader.array(); rows > 0; --rows) {
        wire::Tensor row;
        row.read(reader);
        if (row.index >= names || row.block >= blocks.size()) return false;
        OutputLayout& input = inputs.emplace_back(
            OutputLayout{static_cast<uint32_t>(row.index), static_cast<uint32_t>(row.datatype), row.shape.size(),
                         dims.size(), row.block, row.offset, row.size, 0});
        for (const uint64_t dimension : row.shape) dims.push_back(static_cast<int64_t>(dimension));
        if (!check_tensor(shape(input), input.dims, row.datatype, row.size, &input.elements, &wrong)) return false;
        if (row.offset + row.size > blocks[row.block].size) return false;
      }
      firsts.push_back(inputs.size());
    }
    return !reader.failed();
  }

  bool read_details(Reader& reader) {
    details.clear();
    if (reader.nil()) return true;
    const uint32_t count = reader.array();
    if (count != requests()) return false;
    for (uint32_t i = 0; i < count; ++i) {
      const char* const begin = reader.at();
      std::optional<wire::Details> row;
      moonpool::read(reader, row);
      Details& each = details.emplace_back();
      if (!row) continue;
      each.packed = std::string_view(begin, static_cast<size_t>(reader.at() - begin));
      each.is_rare = row->outputs || row->trace || row->memory != 0;
    }
    return !reader.failed();
  }

  bool read_targets(Reader& reader) {
    targets.clear();
    if (reader.nil()) return true;
    List<wire::Target> rows;
    read_all(reader, rows);
    for (const wire::Target& row : rows) targets.push_back(row);
    return !reader.failed();
  }
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
