#include "open_requests.h"

#include <string>

namespace moonpool {

void release(triton::Request* request, uint32_t flags) noexcept {
  complain(triton::RequestRelease(request, flags), "a request cannot be released");
}

void OpenRequests::begin(uint64_t batch, const std::vector<triton::Request*>& requests) {
  std::lock_guard lock(mutex_);
  batch_ = batch;
  executing_.clear();
  for (triton::Request* request : requests) {
    executing_.push_back({request, nullptr, false, false, false});
  }
}

std::string name_of(triton::Trace* trace, uint64_t batch, uint64_t index) {
  const char* context = nullptr;
  if (triton::InferenceTraceContext) check(triton::InferenceTraceContext(trace, &context));
  if (context && *context) return std::string(context).substr(0, wire::kShort);
  return "#" + std::to_string(batch) + "." + std::to_string(index);
}

triton::Trace* OpenRequests::child_trace(std::string_view name) {
  triton::Trace* child = nullptr;
  const auto look = [&](const Pending& pending, uint64_t batch, uint64_t index) {
    triton::Trace* trace = nullptr;
    if (child || !pending.request) return;
    check(triton::RequestTrace(pending.request, &trace));
    if (!trace || name_of(trace, batch, index) != name) return;
    check(triton::InferenceTraceSpawnChildTrace(trace, &child));
  };
  if (!triton::RequestTrace || !triton::InferenceTraceSpawnChildTrace) return nullptr;
  std::lock_guard lock(mutex_);
  for (size_t index = 0; index < executing_.size(); ++index) look(executing_[index], batch_, index);
  for (const auto& [key, pending] : open_) look(pending, key.first, key.second);
  return child;
}

OpenRequests::Left OpenRequests::answered(size_t index, uint64_t state) {
  std::lock_guard lock(mutex_);
  Pending& pending = executing_[index];
  const bool is_used = pending.factory || pending.is_ended;
  if (state != wire::kOpen) {
    if (is_used) throw Violation("request " + std::to_string(index) + " was answered twice");
    if (state == wire::kRescheduled) check_reschedules();
    pending.is_ended = true;
    return state == wire::kRescheduled ? Left::kReschedule : Left::kRespond;
  }
  if (pending.is_ended) return pending.is_again ? Left::kReschedule : Left::kRelease;
  if (!pending.factory) check(triton::ResponseFactoryNew(&pending.factory, pending.request));
  Pending& moved = open_[Key{batch_, index}] = pending;
  pending.is_ended = true;
  if (reschedules_) return Left::kNothing;
  moved.request = nullptr;
  return Left::kRelease;
}

bool OpenRequests::deserted(size_t index) {
  std::lock_guard lock(mutex_);
  Pending& pending = executing_[index];
  drop_factory(pending);
  return !std::exchange(pending.is_ended, true);
}

void OpenRequests::end() {
  std::lock_guard lock(mutex_);
  batch_ = 0;
  executing_.clear();
}

void OpenRequests::check_reschedules() const {
  if (!reschedules_) throw Violation("a request is rescheduled by a model that is not configured for it");
}

OpenRequests::Pending& OpenRequests::find(const wire::Response& row) {
  const auto open = open_.find(Key{row.batch, row.index});
  if (open != open_.end()) return open->second;
  if (row.batch != batch_ || row.index >= executing_.size() || executing_[row.index].is_ended) {
    throw Violation("a response to request " + std::to_string(row.index) + " of batch " +
                    std::to_string(row.batch) + ", which waits for none");
  }
  return executing_[row.index];
}

void OpenRequests::take(const wire::Response& row, Answers& answers) {
  triton::ResponseFactory* factory;
  {
    std::lock_guard lock(mutex_);
    Pending& pending = find(row);
    if (row.flags == wire::kAgain) check_reschedules();
    if (!pending.factory) check(triton::ResponseFactoryNew(&pending.factory, pending.request));
    factory = pending.factory;
  }
  // Without the lock: what the server does with a response may take long. Nobody else ends the request.
  const uint32_t flags = row.flags == wire::kFinal ? uint32_t{triton::kResponseFinal} : 0;
  if (row.layout || row.remarks) {
    if (row.layout) {
      answer_.read(row.layout->bytes, 1);
    } else {
      answer_.read_nothing();
    }
    answer_.open(row.blocks, answers, nullptr);
    triton::Response* response;
    check(triton::ResponseNewFromFactory(&response, factory));
    answer_.send(response, 0, row.remarks, flags);
    answer_.release(answers);
  } else if (row.flags == 0 || !row.blocks.empty()) {
    throw Violation("a response that says nothing");
  } else if (flags) {
    complain(triton::ResponseFactorySendFlags(factory, flags), "the last response cannot be sent");
  }
  if (row.flags != 0) finish(row);
}

// The request has had its last response. Where its batch is still executing, whoever executes it releases it.
void OpenRequests::finish(const wire::Response& row) {
  triton::Request* held = nullptr;
  const bool is_again = row.flags == wire::kAgain;
  {
    std::lock_guard lock(mutex_);
    Pending& pending = find(row);
    drop_factory(pending);
    pending.is_ended = true;
    pending.is_again = is_again;
    const auto open = open_.find(Key{row.batch, row.index});
    if (open != open_.end()) {
      held = pending.request;
      open_.erase(open);
    }
  }
  if (held) release(held, is_again ? triton::kReleaseReschedule : triton::kReleaseAll);
}

void OpenRequests::drop_factory(Pending& pending) {
  if (!pending.factory) return;
  complain(triton::ResponseFactoryDelete(pending.factory), "a response factory cannot be deleted");
  pending.factory = nullptr;
}

void OpenRequests::fail(const Failure& failure) {
  std::lock_guard lock(mutex_);
  for (auto& [key, pending] : open_) {
    send_failure(pending.factory, triton::ResponseNewFromFactory, failure);
    drop_factory(pending);
    if (pending.request) release(pending.request);
  }
  open_.clear();
}

bool OpenRequests::are_open() {
  std::lock_guard lock(mutex_);
  return !open_.empty();
}

uint64_t OpenRequests::batch() {
  std::lock_guard lock(mutex_);
  return batch_;
}

uint64_t OpenRequests::each_cancelled(
    const std::function<bool(uint64_t batch, uint64_t index)>& tell) {
  std::lock_guard lock(mutex_);
  bool are_new = false, are_all = true;
  const auto look = [&](Pending& pending, uint64_t batch, uint64_t index, auto* is_cancelled, auto* of) {
    if (!pending.is_cancelled && !pending.is_ended && is_cancelled) {
      check(is_cancelled(of, &pending.is_cancelled));
      if (pending.is_cancelled) pending.is_cancelled = tell(batch, index);
      are_new |= pending.is_cancelled;
    }
    are_all &= pending.is_cancelled;
  };
  for (size_t index = 0; index < executing_.size(); ++index) {
    look(executing_[index], batch_, index, triton::RequestIsCancelled, executing_[index].request);
  }
  for (auto& [key, pending] : open_) {
    look(pending, key.first, key.second, triton::ResponseFactoryIsCancelled, pending.factory);
  }
  return are_new && are_all ? batch_ : 0;
}

}  // namespace moonpool
