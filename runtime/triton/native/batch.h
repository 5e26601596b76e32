// Requests that are executed together: gathered, placed where the stub sees them, answered, counted, released.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "answer.h"
#include "api.h"
#include "model.h"
#include "stub.h"
#include "wire.h"

namespace moonpool {

// One batch after another, on the instance's thread. Its memory is used again.
class Batch {
 public:
  Batch(triton::ModelInstance* instance, const Model& model, bool is_on_device)
      : instance_(instance), model_(model), is_on_device_(is_on_device), answer_(model.outputs()) {}

  // Begin with these requests, which from now on are dealt with here. One that cannot be executed gets its error at once.
  void gather(triton::Request** requests, uint32_t count);
  bool is_empty() const { return requests_.empty(); }
  // Send the batch; false where the stub was gone already and has not got it. Throws Failure where it was not sent, and
  // Violation.
  bool give(Stub& stub);
  // Wait for the answer, and give everybody what is his. Throws Violation, and Failure where the stub has ended.
  void finish(Stub& stub);
  // Answer those that have no answer yet with this error. `stub` has ended, or is null if it never got them.
  void fail(const Failure& failure, Stub* stub) noexcept;
  // Count the requests and let go of them.
  void close() noexcept;

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
  struct Details {
    std::string_view id, correlation_text, trace;
    uint64_t correlation, timeout_us;
    uint32_t flags, parameters, outputs;
  };
  struct Item {
    size_t first, count;  // of its tensors
    Details details;
    bool has_details, is_answered, is_good;
    OpenRequests::Left left;
  };
  void gather_one(triton::Request* request);
  void gather_input(triton::Request* request, uint32_t number);
  Details details_of(triton::Request* request) const;
  bool are_usual(const Details& details) const;
  void lay_out();
  void copy(char* block) const;
  void write(Stub& stub, const wire::Block& block);
  void write_details(Writer& writer) const;
  void write_details_of(Writer& writer, size_t i) const;
  void wait(Stub& stub);
  void take_answer(Stub& stub, const wire::Answer& said);
  void respond(size_t i, const std::optional<wire::Remarks>& remarks);
  void fail_alone(triton::Request* request, const Failure& failure) noexcept;

  triton::ModelInstance* const instance_;
  const Model& model_;
  const bool is_on_device_;
  Answer answer_;
  std::vector<triton::Request*> requests_;
  std::vector<Item> items_;
  std::vector<Tensor> tensors_;
  size_t most_tensors_ = 0;
  uint64_t size_ = 0, rows_ = 0, number_ = 0;
  uint64_t start_ns_ = 0, sent_ns_ = 0, answered_ns_ = 0;
  Writer layout_, message_;
  std::vector<wire::Place> released_;
  Packet packet_;
};

}  // namespace moonpool
