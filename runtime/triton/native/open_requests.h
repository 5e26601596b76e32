// Requests whose responses come separately from the answer to their batch.
//
// Theory of operation. Responses come on the control channel and the answer on the work channel, which different
// threads read, so a request's response may be read before or after the answer to its batch. `mutex_` guards the state
// of each request. The thread that finds it complete releases it, once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api.h"
#include "memory.h"
#include "responses.h"
#include "wire.h"

namespace moonpool {

// Returns the name of a trace for the model: its context, or a name that only this process knows.
inline std::string name_of(triton::Trace* trace, uint64_t batch, uint64_t index) {
  const char* context = nullptr;
  if (triton::InferenceTraceContext) check(triton::InferenceTraceContext(trace, &context));
  // A text that is not UTF-8 grows to three times its size when it is sent.
  if (context && *context) return std::string(beginning(context, is_utf8(context) ? wire::kShort : wire::kShort / 3));
  return "#" + std::to_string(batch) + "." + std::to_string(index);
}

// Release a request, which has ended or, with other flags, is scheduled once more.
inline void release(triton::Request* request, uint32_t flags = triton::kReleaseAll) noexcept {
  complain(triton::RequestRelease(request, flags), "a request cannot be released");
}

// Finds the request of a response. The instance's thread and the thread that reads the control channel use it.
class OpenRequests {
 public:
  explicit OpenRequests(const Model& model)
      : responses_(model), reschedules_(model.facts().reschedules), is_decoupled_(model.facts().is_decoupled) {}

  // The next step for a request after the answer to its batch.
  enum class Left { kRespond, kRelease, kReschedule, kNothing };

  // Note a batch that will be sent. For the instance's thread.
  void begin(uint64_t batch, const std::vector<triton::Request*>& requests) {
    std::lock_guard lock(mutex_);
    batch_ = batch;
    for (size_t index = 0; index < requests.size(); ++index) pending_[Key{batch, index}] = {requests[index]};
  }

  // Return the next step for a request of the answered batch. Call it once for each. Throws Violation.
  Left answered(size_t index, uint64_t state) {
    std::lock_guard lock(mutex_);
    Pending& pending = pending_.at(Key{batch_, index});
    if (state != wire::kOpen) {
      if (pending.factory || pending.is_ended) {
        throw Violation("request " + std::to_string(index) + " was answered twice");
      }
      if (state == wire::kRescheduled) check_reschedules();
      pending.is_ended = true;
      return state == wire::kRescheduled ? Left::kReschedule : Left::kRespond;
    }
    if (pending.is_ended) return pending.is_again ? Left::kReschedule : Left::kRelease;
    if (!pending.factory) check(triton::ResponseFactoryNew(&pending.factory, pending.request));
    pending.is_open = true;
    if (reschedules_) return Left::kNothing;
    pending.request = nullptr;
    return Left::kRelease;
  }

  // Return true if a request of a batch without an answer still waits for a response. Call it once for each, after the
  // last message of the stub was read.
  bool deserted(size_t index) {
    std::lock_guard lock(mutex_);
    Pending& pending = pending_.at(Key{batch_, index});
    drop_factory(pending);
    return !std::exchange(pending.is_ended, true);
  }

  // Note that no batch is out.
  void end() {
    std::lock_guard lock(mutex_);
    const auto last = pending_.lower_bound(Key{batch_ + 1, 0});
    for (auto each = pending_.lower_bound(Key{batch_, 0}); each != last;) {
      each = each->second.is_open ? std::next(each) : pending_.erase(each);
    }
    batch_ = 0;
  }

  // Handle a response. For one thread at a time. Throws Violation.
  void take(const wire::Response& row, Answers& answers) {
    triton::ResponseFactory* factory;
    {
      std::lock_guard lock(mutex_);
      Pending& pending = find(row);
      if (row.flags == wire::kAgain) check_reschedules();
      check_number(pending, row);
      if (!pending.factory) check(triton::ResponseFactoryNew(&pending.factory, pending.request));
      factory = pending.factory;
    }
    // Send without the lock, because the server's callback may take long. No other thread ends the request.
    const uint32_t flags = row.flags == wire::kFinal ? uint32_t{triton::kResponseFinal} : 0;
    responses_.read(row);
    if (row.layout || row.remarks) {
      responses_.open(row.blocks, answers, nullptr);
      triton::Response* response;
      check(triton::ResponseNewFromFactory(&response, factory));
      responses_.send(response, 0, row.remarks, flags);
      responses_.release(answers);
    } else if (flags) {
      complain(triton::ResponseFactorySendFlags(factory, flags), "the last response cannot be sent");
    }
    if (row.flags != 0) finish(row);
    responses_.check_strings();
  }

  // End all open requests with an error, because no response will come.
  void fail(const Failure& failure) {
    std::lock_guard lock(mutex_);
    for (auto each = pending_.begin(); each != pending_.end();) {
      Pending& pending = each->second;
      if (!pending.is_open) {
        ++each;
        continue;
      }
      send_failure(pending.factory, triton::ResponseNewFromFactory, failure);
      drop_factory(pending);
      if (pending.request) release(pending.request);
      each = pending_.erase(each);
    }
  }

  // True if a request is still open after the answer to its batch.
  bool are_open() {
    std::lock_guard lock(mutex_);
    return std::any_of(pending_.begin(), pending_.end(), [](const auto& each) { return each.second.is_open; });
  }

  // Returns a trace for a request that the model makes on behalf of the request with this name; null if that is not
  // traced.
  triton::Trace* child_trace(std::string_view name) {
    if (!triton::RequestTrace || !triton::InferenceTraceSpawnChildTrace) return nullptr;
    std::lock_guard lock(mutex_);
    for (const auto& [key, pending] : pending_) {
      triton::Trace *trace = nullptr, *child;
      if (!pending.request) continue;
      check(triton::RequestTrace(pending.request, &trace));
      if (!trace || name_of(trace, key.first, key.second) != name) continue;
      check(triton::InferenceTraceSpawnChildTrace(trace, &child));
      return child;
    }
    return nullptr;
  }

  // Returns the number of the batch that is executing, 0 for none.
  uint64_t batch() {
    std::lock_guard lock(mutex_);
    return batch_;
  }

  // Calls `send` for each request that nobody waits for any more, until it has returned true for it. If these were the
  // last ones that anybody waited for, returns the batch that is executing, else 0.
  uint64_t each_cancelled(const std::function<bool(uint64_t batch, uint64_t index)>& send) {
    std::lock_guard lock(mutex_);
    bool are_new = false, are_all = true;
    for (auto& [key, pending] : pending_) {
      bool& is_cancelled = pending.is_cancelled;
      if (!is_cancelled && !pending.is_ended) {
        if (pending.factory && triton::ResponseFactoryIsCancelled) {
          check(triton::ResponseFactoryIsCancelled(pending.factory, &is_cancelled));
        } else if (pending.request && triton::RequestIsCancelled) {
          check(triton::RequestIsCancelled(pending.request, &is_cancelled));
        }
        if (is_cancelled) is_cancelled = send(key.first, key.second);
        are_new |= is_cancelled;
      }
      are_all &= is_cancelled;
    }
    return are_new && are_all ? batch_ : 0;
  }

 private:
  struct Pending {
    triton::Request* request;  // null where it was released
    triton::ResponseFactory* factory = nullptr;
    bool is_open = false;  // after its batch
    bool is_ended = false, is_again = false, is_cancelled = false;
    bool has_response = false;
  };
  using Key = std::pair<uint64_t, uint64_t>;
  Pending& find(const wire::Response& row) {
    const auto found = pending_.find(Key{row.batch, row.index});
    if (found == pending_.end() || found->second.is_ended) {
      throw Violation("a response to request " + std::to_string(row.index) + " of batch " + std::to_string(row.batch) +
                      ", which waits for none");
    }
    return found->second;
  }

  // Ends a request that has had its last response. If its batch is still executing, the executing thread releases it.
  void finish(const wire::Response& row) {
    triton::Request* held = nullptr;
    const bool is_again = row.flags == wire::kAgain;
    {
      std::lock_guard lock(mutex_);
      Pending& pending = find(row);
      drop_factory(pending);
      pending.is_ended = true;
      pending.is_again = is_again;
      if (pending.is_open) {
        held = pending.request;
        pending_.erase(Key{row.batch, row.index});
      }
    }
    if (held) release(held, is_again ? triton::kReleaseReschedule : triton::kReleaseAll);
  }

  void check_reschedules() const {
    if (!reschedules_) throw Violation("a request is rescheduled by a model that is not configured for it");
  }

  // A request of a model that is not decoupled has one response. A sender that was dropped before the last flag is an
  // error even after that response.
  void check_number(Pending& pending, const wire::Response& row) const {
    const bool is_response = row.layout || row.remarks;
    const bool is_failure = row.flags != 0 && row.remarks && row.remarks->error;
    if (!is_decoupled_ && is_response && pending.has_response && !is_failure) {
      throw Violation("a second response of a model that is not decoupled");
    }
    pending.has_response |= is_response;
    if (!is_decoupled_ && !pending.has_response && row.flags == wire::kFinal) {
      throw Violation("the end of a request that had no response");
    }
  }

  static void drop_factory(Pending& pending) {
    if (!pending.factory) return;
    complain(triton::ResponseFactoryDelete(pending.factory), "a response factory cannot be deleted");
    pending.factory = nullptr;
  }

  Responses responses_;
  // The model may have a request scheduled again until its last response. It is not released before.
  const bool reschedules_, is_decoupled_;
  std::mutex mutex_;
  uint64_t batch_ = 0;
  // Requests of the batch that is executing, and open ones, by batch and index.
  std::map<Key, Pending> pending_;
};

}  // namespace moonpool
