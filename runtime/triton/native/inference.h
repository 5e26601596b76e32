// A request of a stub's model to another model: the server's request, the memory that it looks at, and its responses.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api.h"
#include "memory.h"
#include "wire.h"

namespace moonpool {

class Calls;

// Lives until the server has let go of the request and its last response is there. Any thread may call any method.
class Inference : public std::enable_shared_from_this<Inference> {
 public:
  // `batch`: the one that the model executes, 0 for none.
  Inference(std::shared_ptr<Calls> calls, uint64_t call, uint64_t batch)
      : calls_(std::move(calls)), call_(call), batch_(batch) {}
  ~Inference();
  Inference(const Inference&) = delete;

  // Look at the memory that the stub names. Throws Violation.
  void hold(const List<wire::Block>& blocks, Loans& loans, Answers& answers);
  // Give the request to the server; responses come from then on. Throws Failure, and Violation.
  // `trace` is for the request to own, or null.
  void start(const wire::Infer& asked, triton::Server* server, triton::Trace* trace);
  uint64_t batch() const { return batch_; }
  // Nobody wants its responses any more.
  void cancel() noexcept;

 private:
  void make(const wire::Infer& asked, triton::Server* server);
  void add_input(const wire::NamedTensor& input);
  void set_details(const wire::InferDetails& details);
  void let_go() noexcept;
  void respond(triton::InferenceResponse* response, bool is_final);
  static triton::ResponseAllocator* allocator();
  static void released(triton::InferenceRequest* request, uint32_t flags, void* inference) noexcept;
  static void responded(triton::InferenceResponse* response, uint32_t flags, void* inference) noexcept;

  const std::shared_ptr<Calls> calls_;
  const uint64_t call_, batch_;
  std::vector<View> blocks_;
  // Those of the stub's own, which it gets back; and those that it was lent.
  std::vector<Spot> answers_, loans_;
  std::deque<std::string> copies_;
  uint64_t copied_bytes_ = 0;
  std::vector<int64_t> shape_;

  std::mutex mutex_;  // of the request, which the server may let go of at any time
  triton::InferenceRequest* request_ = nullptr;
};

}  // namespace moonpool
