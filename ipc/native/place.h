// Where the inputs of a batch lie: the arithmetic of EXECUTE's first block, and its field `layout`.
//
// `lay_out` in runtime/stubs/layout.py gives the same offsets and the same bytes. Nothing is looked up or remembered by
// the shapes of a batch, and nothing allocates, except that a Writer grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "msgpack.h"

namespace moonpool {

// An input of a request, as a row of a layout describes it.
struct PlacedTensor {
  uint64_t index;     // among the model's inputs
  uint64_t datatype;  // of the tables
  const int64_t* shape;
  uint64_t dims;
  uint64_t size;  // in bytes
  // Block 0 is the one that inputs are copied into. An input in another block lies there already, at this offset.
  uint64_t block, offset;
};

// Sets the offsets of the tensors that block 0 is for, and the size of that block, which is 0 if there are none. Each
// request has so many of the tensors, one request's behind those of the one before it. Returns false if the block would
// have more bytes than a message can say.
//
// The rows of one input lie back to back across the requests, so a model that wants them stacked need not copy them.
bool place(const std::vector<uint32_t>& counts, std::vector<PlacedTensor>& tensors, uint64_t* size);

// Writes the field `layout` for tensors that were placed.
void write_layout(Writer& writer, const std::vector<uint32_t>& counts, const std::vector<PlacedTensor>& tensors);

// Writes the row of one tensor, which is named by its index or its name.
template <class Which>
void write_tensor(Writer& writer, const Which& which, uint64_t datatype, const int64_t* shape, uint64_t dims,
                  uint64_t block, uint64_t offset, uint64_t size) {
  writer.array(6);
  write_all(writer, which, datatype);
  writer.array(dims);
  for (uint64_t i = 0; i < dims; ++i) writer.integer(shape[i]);
  write_all(writer, block, offset, size);
}

}  // namespace moonpool
