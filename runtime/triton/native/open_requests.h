// Requests whose responses come apart from the answer to their batch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "answer.h"
#include "api.h"
#include "memory.h"
#include "wire.h"

namespace moonpool {

// Finds the request that a response is for. The thread that executes a batch and those that read the control channel
// meet here: responses come before the answer to their batch and after it.
class OpenRequests {
 public:
  explicit OpenRequests(const Model& model) : answer_(model), reschedules_(model.facts().reschedules) {}

  // What the answer to a batch leaves to be done with a request.
  enum class Left { kRespond, kRelease, kReschedule, kNothing };

  // For the thread that executes: this batch is about to be sent.
  void begin(uint64_t batch, const std::vector<triton::Request*>& requests);
  // The batch was answered: what is left to do with one of its requests? Once for each. Throws Violation.
  Left answered(size_t index, uint64_t state);
  // The batch will not be answered: whether the request waits for a response still. Once for each, when nobody reads
  // any more.
  bool deserted(size_t index);
  // No answer is waited for any more.
  void end();

  // For one thread at a time: a response. Throws Violation.
  void take(const wire::Response& row, Answers& answers);
  // No more will come: end what is open with an error.
  void fail(const Failure& failure);

  // Whether any is beyond its batch.
  bool are_open();
  // A trace for a request that the model makes on behalf of the one of this name; null where that is not traced.
  triton::Trace* child_trace(std::string_view name);
  // The batch that is executing, 0 for none.
  uint64_t batch();
  // Those that nobody waits for any more, until `tell` has returned true for them. Returns the batch that is executing where
  // these were the last that anybody waited for, else 0.
  uint64_t each_cancelled(const std::function<bool(uint64_t batch, uint64_t index)>& tell);

 private:
  struct Pending {
    triton::Request* request;  // null where it was released
    triton::ResponseFactory* factory = nullptr;
    bool is_open = false;  // beyond its batch
    bool is_ended = false, is_again = false, is_cancelled = false;
  };
  using Key = std::pair<uint64_t, uint64_t>;
  Pending& find(const wire::Response& row);
  void finish(const wire::Response& row);
  void check_reschedules() const;
  static void drop_factory(Pending& pending);

  Answer answer_;
  // A request may come back as long as it has not had its last response, and is not released before.
  const bool reschedules_;
  std::mutex mutex_;
  uint64_t batch_ = 0;
  // Those of the batch that is executing, and those that are open, by batch and index.
  std::map<Key, Pending> pending_;
};

// What a trace is called towards the model: its context, or what only this process knows.
std::string name_of(triton::Trace* trace, uint64_t batch, uint64_t index);

// Release a request: done with, or to be scheduled once more.
void release(triton::Request* request, uint32_t flags = triton::kReleaseAll) noexcept;

}  // namespace moonpool
