// Requests that are executed together: gathered, placed where the stub sees them, answered, counted, released.
#pragma once

#include <cstdint>
#include <vector>

#include "answer.h"
#include "api.h"
#include "model.h"
#include "requests.h"
#include "stub.h"
#include "wire.h"

namespace moonpool {

// One batch after another, on the instance's thread. Its memory is used again.
class Batch {
 public:
  Batch(triton::ModelInstance* instance, const Model& model, bool is_on_device)
      : instance_(instance), model_(model), requests_(model, is_on_device), answer_(model) {}

  // Begin with these requests, which from now on are dealt with here. One that cannot be executed gets its error at once.
  void gather(triton::Request** requests, uint32_t count);
  bool is_empty() const { return outcomes_.empty(); }
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
  // What became of one request.
  struct Outcome {
    bool is_answered = false, is_good = true;
    OpenRequests::Left left = OpenRequests::Left::kRelease;
  };
  void write(Stub& stub, const wire::Block& block);
  void wait(Stub& stub);
  void take_answer(Stub& stub, const wire::Answer& said);
  void respond(size_t i, const std::optional<wire::Remarks>& remarks);
  void fail_alone(triton::Request* request, const Failure& failure) noexcept;

  triton::ModelInstance* const instance_;
  const Model& model_;
  Requests requests_;
  Answer answer_;
  std::vector<Outcome> outcomes_;
  uint64_t number_ = 0;
  uint64_t start_ns_ = 0, sent_ns_ = 0, answered_ns_ = 0;
  Writer message_;
  std::vector<wire::Place> released_;
  Packet packet_;
};

}  // namespace moonpool
