// Calls of a stub's model on the calls channel: requests to other models, loading and unloading them, metrics.
//
// Theory of operation. The thread that listens to the stub reads questions. Answers come from any thread of the server:
// the callbacks of requests, and the threads of `spend_time` for calls that may take long. `mutex_` guards the open
// calls, the send queue, the budgets and the pointer to the stub. It is held while a message is made and sent, since
// `message_` is shared.
//
// A call may outlive its stub. `close` clears `stub_` under the lock, and every answer looks at it under the lock, so
// none touches a stub that is gone; the shared_ptr keeps this object for late callbacks. The thread that listens calls
// `close` itself, so it may use `stub_` without the lock before. A stub that does not read
// blocks nobody: messages that the socket does not take wait in `waiting_` until the listener sees it writable, and
// their bytes are bounded.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "api.h"
#include "budget.h"
#include "channel.h"
#include "memory.h"
#include "metrics.h"
#include "model.h"
#include "wire.h"

namespace moonpool {

class Inference;
class Stub;

// The calls of one stub. See the theory of operation above.
class Calls : public std::enable_shared_from_this<Calls> {
 public:
  using Write = std::function<void(Writer&)>;

  Calls(Channel channel, Stub& stub, const Model& model);

  // The methods down to `close` are for the thread that listens.

  int fd() const { return channel_.fd(); }
  // The events to poll for beside questions: POLLOUT while messages wait for the stub to read.
  short events();
  // Send messages that the stub's socket did not take before. Throws Violation.
  void send_waiting();
  // Read one question, and no more, because the next one may depend on a message of another channel. Returns false at
  // the end of the channel. Throws Violation.
  bool read(RateLimiter& rate_limiter);
  // Cancel all calls, because the stub has ended.
  void close();
  // True if the model ever had metrics. From any thread.
  bool has_metrics() const { return metrics_.were_held(); }
  // Apply changes of metrics. Returns the number of observations in them. Throws Violation.
  uint64_t change_metrics(const wire::Metrics& changes) { return metrics_.change(changes); }

  // The methods below are for any thread.

  // Cancel the calls that the model made for a batch, because nobody waits for the batch.
  void leave(uint64_t batch);

  // Charge the copy budget, until `give_copies_back`, for strings or for a message in memory. Both throw Failure.
  void charge_for_strings(uint64_t size);
  void charge_for_message(uint64_t size);
  void give_copies_back(uint64_t size, uint64_t message_size);
  // Lend the stub memory for an output, until the stub releases it or `take_back`. Throws Failure.
  View lend(uint64_t size, Spot* spot);
  void take_back(Spot spot) noexcept;
  // Release the blocks that a request looked at, in the stub's own memory and in memory that it borrowed.
  void release(const std::vector<Spot>& answers, const std::vector<Spot>& borrowed_blocks) noexcept;
  // Send a response, unless the call is over. Returns true if it was sent. `write` adds the fields of REPLY behind
  // `released`.
  bool reply(uint64_t call, bool is_final, const Write& write) noexcept;
  // Returns a writer for a response that is an error, with a text of at most `most` bytes.
  static Write only(const Failure& failure, size_t most = wire::kLongestError);
  // Returns an error as the model may read it: a contained one learns nothing of the machine.
  Failure readable(const Failure& failure) const noexcept;
  // End a call with an error, unless it is over.
  void fail(uint64_t call, const Failure& failure) noexcept;

 private:
  using Question = Decoded<wire::Kind>;
  void handle(const Question& question);
  void perform(const Question& question);
  void infer(const wire::Infer& asked);
  void start(Inference& inference, const wire::Infer& asked);
  // Returns the inference of an open call, else null.
  std::shared_ptr<Inference> find(uint64_t call);
  // Let the called model stop. Its responses still come.
  void cancel(uint64_t call);
  // Drop all further responses.
  void withdraw(uint64_t call);
  void take_back(const List<wire::Place>& places);
  // The fields of a message in memory that are read before the message is copied.
  struct Head {
    wire::Kind kind;
    uint64_t call;
  };
  static Head head_of(Reader& reader);
  bool takes_in(const wire::Indirect& where, std::string_view beginning, RateLimiter& rate_limiter);
  // Charge the copy budget for a load, which has `own` bytes already. Throws Failure.
  void charge_for_load(uint64_t size, uint64_t own = 0);
  void check_may_load(const std::string& name, bool brings_files) const;
  void load(const wire::LoadModel& asked);
  void unload(const wire::UnloadModel& asked);
  void answer_ready(const wire::IsModelReady& asked);
  void spend_time(uint64_t call, std::function<Write()> task, uint64_t copied = 0);
  void done(uint64_t call, const Failure* failure, const Write& values = {}) noexcept;
  void check_new(uint64_t call);
  void check_may_ask(const std::string& name) const;
  // Throws Failure unless the model may ask for all models; `what` says what takes that.
  void check_may_ask_all(const std::string& what) const;
  // Throws Failure if kMaxTasks threads are running already.
  void check_tasks();

  // Begin, complete and send a message. The caller holds the lock.
  template <wire::Kind kind>
  void begin(uint64_t call);
  void send();
  bool send_reply(uint64_t call, bool is_final, const Write& write);

  const Channel channel_;
  const Model& model_;
  Packet packet_;
  // The current message, if it lay in memory.
  std::string stored_;
  Metrics metrics_;

  std::mutex mutex_;  // guards all members below
  Stub* stub_;        // null when it has ended
  std::map<uint64_t, std::shared_ptr<Inference>> open_;
  std::set<uint64_t> tasks_;
  std::deque<std::string> waiting_;
  uint64_t waiting_bytes_ = 0;
  // Budgets for copies of loads and strings, and of requests in memory.
  CopyBudget copies_{wire::kCopiedLoadsBytes}, messages_{wire::kCopiedBytes};
  Writer message_;
  std::vector<wire::Place> released_;
};

}  // namespace moonpool
