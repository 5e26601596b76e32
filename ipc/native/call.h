// INFER, the request of a model to another one, as the end that serves it reads it. All of it is untrusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "answer.h"
#include "codec.h"
#include "wire.h"

namespace moonpool {

// A tensor that a message names, and its place.
struct NamedLayout {
  std::string_view name;
  uint32_t datatype, dims;
  size_t first_dim;  // of all tensors' dimensions
  uint64_t block, offset, size;
};

// An INFER all of whose inputs lie within the blocks that it names. The caller finds out if these blocks are the
// stub's. Names and details point into the packet.
class PlainCall {
 public:
  // More inputs than a usual call has: each is compared with each other one.
  static constexpr size_t kMostInputs = 64;

  // Reads a packet of the stub. Returns false for any other message, and for one that breaks the protocol.
  bool read(std::string_view packet) {
    try {
      const auto decoded = decode(wire::kCalls, wire::Side::STUB, packet);
      if (!decoded || decoded.kind() != wire::Kind::INFER) return false;
      Reader reader = decoded.fields;
      List<wire::Place> places;
      List<wire::Block> named;
      List<wire::NamedTensor> rows;
      List<std::string_view> wanted;
      read_all(reader, call, model, version, decoupled, timeout_us, places, named, rows, wanted);
      const char* const begin = reader.at();
      if (reader.nil()) {
        details = {};
      } else {
        reader.skip();
        details = std::string_view(begin, static_cast<size_t>(reader.at() - begin));
      }
      if (reader.failed() || rows.size() > kMostInputs || named.size() > rows.size()) return false;
      released.clear();
      for (const wire::Place& place : places) released.push_back(place);
      blocks.clear();
      for (const wire::Block& block : named) blocks.push_back(block);
      outputs.clear();
      for (const std::string_view& name : wanted) outputs.push_back(name);
      inputs.clear();
      dims.clear();
      for (const wire::NamedTensor& row : rows) {
        if (!add(row)) return false;
      }
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  const int64_t* shape(const NamedLayout& input) const { return dims.data() + input.first_dim; }

  uint64_t call = 0;
  std::string_view model;
  int64_t version = 0;
  bool decoupled = false;
  uint64_t timeout_us = 0;
  std::vector<wire::Place> released;
  std::vector<wire::Block> blocks;
  std::vector<NamedLayout> inputs;
  std::vector<int64_t> dims;
  std::vector<std::string_view> outputs;
  // As they are packed; empty if the call has none.
  std::string_view details;

 private:
  bool add(const wire::NamedTensor& row) {
    if (row.block >= blocks.size() || row.offset + row.size > blocks[row.block].size) return false;
    for (const NamedLayout& other : inputs) {
      if (other.name == row.name) return false;
    }
    const NamedLayout& input = inputs.emplace_back(
        NamedLayout{row.name, static_cast<uint32_t>(row.datatype), row.shape.size(), dims.size(), row.block, row.offset,
                    row.size});
    for (const uint64_t dimension : row.shape) dims.push_back(static_cast<int64_t>(dimension));
    uint64_t elements;
    std::string wrong;
    return check_tensor(shape(input), input.dims, row.datatype, row.size, &elements, &wrong);
  }
};

}  // namespace moonpool
