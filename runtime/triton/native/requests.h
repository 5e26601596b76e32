// What the requests of a batch hold, as it is sent to a stub.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "api.h"
#include "model.h"
#include "wire.h"

namespace moonpool {

// The requests of one batch after another. Its memory is used again. One thread at a time.
class Requests {
 public:
  // `is_on_device`: a model might leave outputs on a device, where they are not wanted.
  Requests(const Model& model, bool is_on_device) : model_(model), is_on_device_(is_on_device) {}

  // Begin with a batch of this number.
  void begin(uint64_t batch);
  // Throws Failure for one that cannot be executed; then it is not among these.
  void add(triton::Request* request);
  const std::vector<triton::Request*>& all() const { return requests_; }
  // Rows of them together, as the server counts them.
  uint64_t rows() const { return rows_; }

  // Plan a block for all inputs; the bytes that it takes.
  uint64_t lay_out();
  void copy(char* block) const;
  // The block's layout, and the details of each request, in the words of EXECUTE.
  std::string_view layout() const { return layout_.bytes(); }
  void write_details(Writer& writer) const;

 private:
  struct Tensor {
    uint64_t index;
    int datatype;
    const int64_t* shape;
    uint32_t dims, buffers;
    uint64_t size, offset;
    triton::Input* input;
    const void* bytes;  // of the first buffer
    uint64_t first_size;
  };
  struct Item {
    size_t first, count;  // of its tensors
  };
  void gather(triton::Request* request);
  void gather_input(triton::Request* request, uint32_t number);
  void gather_details(triton::Request* request);
  void gather_outputs(triton::Request* request, uint32_t count);

  const Model& model_;
  const bool is_on_device_;
  std::vector<triton::Request*> requests_;
  std::vector<Item> items_;
  std::vector<Tensor> tensors_;
  size_t most_tensors_ = 0;
  uint64_t batch_ = 0, rows_ = 0;
  // One value for each request: nil for one of which there is nothing to say.
  Writer details_;
  bool has_details_ = false;
  Writer layout_;
};

}  // namespace moonpool
