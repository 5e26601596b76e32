// INFER, the request of a model to another one, as the end that serves it reads it, and REPLY, as the end that asked
// does.
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

// A message about a call, all of whose tensors lie within the blocks that it names. The caller finds out if these
// blocks are the peer's. Names point into the packet.
class NamedTensors {
 public:
  // More tensors than a usual call has: each is compared with each other one.
  static constexpr size_t kMostTensors = 64;

  const int64_t* shape(const NamedLayout& tensor) const { return dims.data() + tensor.first_dim; }

  uint64_t call = 0;
  std::vector<wire::Place> released;
  std::vector<wire::Block> blocks;
  std::vector<NamedLayout> tensors;
  std::vector<int64_t> dims;

 protected:
  bool take(const List<wire::Place>& places, const List<wire::Block>& named, const List<wire::NamedTensor>& rows) {
    if (rows.size() > kMostTensors || named.size() > rows.size()) return false;
    released.clear();
    for (const wire::Place& place : places) released.push_back(place);
    blocks.clear();
    for (const wire::Block& block : named) blocks.push_back(block);
    tensors.clear();
    dims.clear();
    for (const wire::NamedTensor& row : rows) {
      if (!add(row)) return false;
    }
    return true;
  }

 private:
  bool add(const wire::NamedTensor& row) {
    if (row.block >= blocks.size() || row.offset + row.size > blocks[row.block].size) return false;
    for (const NamedLayout& other : tensors) {
      if (other.name == row.name) return false;
    }
    const NamedLayout& tensor = tensors.emplace_back(
        NamedLayout{row.name, static_cast<uint32_t>(row.datatype), row.shape.size(), dims.size(), row.block, row.offset,
                    row.size});
    for (const uint64_t dimension : row.shape) dims.push_back(static_cast<int64_t>(dimension));
    uint64_t elements;
    std::string wrong;
    return check_tensor(shape(tensor), tensor.dims, row.datatype, row.size, &elements, &wrong);
  }
};

// An INFER. All of it is untrusted. Details point into the packet.
class PlainCall : public NamedTensors {
 public:
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
      outputs.clear();
      for (const std::string_view& name : wanted) outputs.push_back(name);
      return !reader.failed() && take(places, named, rows);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  std::string_view model;
  int64_t version = 0;
  bool decoupled = false;
  uint64_t timeout_us = 0;
  std::vector<std::string_view> outputs;
  // As they are packed; empty if the call has none.
  std::string_view details;
};

// A REPLY that is the only one to its call, and has nothing but outputs.
class PlainReply : public NamedTensors {
 public:
  // Reads a packet of the runtime. Returns false for any other message, and for one that breaks the protocol.
  bool read(std::string_view packet) {
    try {
      const auto decoded = decode(wire::kCalls, wire::Side::RUNTIME, packet);
      if (!decoded || decoded.kind() != wire::Kind::REPLY) return false;
      Reader reader = decoded.fields;
      bool is_last = false;
      List<wire::Place> places;
      List<wire::Block> named;
      List<wire::NamedTensor> rows;
      read_all(reader, call, is_last, places, named, rows);
      return reader.nil() && reader.nil() && !reader.failed() && is_last && take(places, named, rows);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
};

}  // namespace moonpool
