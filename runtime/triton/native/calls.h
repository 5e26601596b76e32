// What the model in a stub asks for, on the calls channel: other models, what is to be done with them, metrics.
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

// Questions are read by the thread that listens to the stub, and answered by whichever thread has the answer; what takes
// long has a thread of its own. All of these may outlive the stub, and find then that nobody wants to know.
class Calls : public std::enable_shared_from_this<Calls> {
 public:
  using Write = std::function<void(Writer&)>;

  Calls(Channel channel, Stub& stub, const Model& model);

  // What follows is for the thread that listens.

  int fd() const { return channel_.fd(); }
  // What to wait for beside questions: that the stub reads, where it is behind with that.
  short events();
  // Send what the stub had no room for. Throws Violation.
  void send_waiting();
  // Take in one question of the stub's: the next may be about what it says elsewhere meanwhile. False at the
  // end of the channel. Throws Violation.
  bool read(Flow& flow);
  // The stub is gone: what it asked for is not wanted any more.
  void close();
  // Whether it ever had any. From any thread.
  bool has_metrics() const { return metrics_.were_held(); }
  // What the model did to its metrics; how many observations that was. Throws Violation.
  uint64_t change_metrics(const wire::Metrics& changes) { return metrics_.change(changes); }

  // What follows is for any thread.

  // Nobody waits for what the model does with a batch: cancel what it has asked others meanwhile.
  void leave(uint64_t batch);

  // Take room for a copy of strings, or of a model to be loaded, until `give_room_back`. Throws Failure.
  void take_room(uint64_t size);
  // Take room for a copy of a message that lay in memory. Throws Failure.
  void take_room_for_message(uint64_t size);
  void give_room_back(uint64_t size, uint64_t message_size);
  // Memory for an output: the stub's until it lets go of it, or `take_back`. Throws Failure.
  View lend(uint64_t size, Spot* spot);
  void take_back(Spot spot) noexcept;
  // What a request looked at in the stub's own memory, and in what the stub was lent.
  void release(const std::vector<Spot>& answers, const std::vector<Spot>& loans) noexcept;
  // Send a response, unless the call is over; whether it was sent. `write` adds what follows `released` in REPLY.
  bool reply(uint64_t call, bool is_final, const Write& write) noexcept;
  // What a response says that is but an error, in at most so many bytes.
  static Write only(const Failure& failure, size_t most = 65'536);
  // End a call with an error, unless it is over.
  void fail(uint64_t call, const Failure& failure) noexcept;

 private:
  using Question = Decoded<wire::Kind>;
  void handle(const Question& question);
  void perform(const Question& question);
  void infer(const wire::Infer& asked);
  void start(Inference& inference, const wire::Infer& asked);
  // The call's inference while it is open, else null.
  std::shared_ptr<Inference> find(uint64_t call);
  // The model that was asked may stop; its responses go on.
  void cancel(uint64_t call);
  // The responses are not wanted any more.
  void withdraw(uint64_t call);
  void take_back(const List<wire::Place>& places);
  // The fields of a message in memory that are read before it is copied.
  struct Head {
    wire::Kind kind;
    uint64_t call;
  };
  static Head head_of(Reader& reader);
  bool takes_in(const wire::Indirect& where, std::string_view beginning, Flow& flow);
  void check_may_load(const std::string& name, bool brings_files) const;
  void load(const wire::LoadModel& asked);
  void unload(const wire::UnloadModel& asked);
  void tell_ready(const wire::IsModelReady& asked);
  void spend_time(uint64_t call, std::function<Write()> task, uint64_t copied = 0);
  void done(uint64_t call, const Failure* failure, const Write& values = {}) noexcept;
  void check_new(uint64_t call);
  void check_may_ask(const std::string& name) const;

  // With the lock taken: a message is begun, completed and sent.
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

  std::mutex mutex_;  // guards what follows
  Stub* stub_;        // null when it is gone
  std::map<uint64_t, std::shared_ptr<Inference>> open_;
  std::set<uint64_t> tasks_;
  std::deque<std::string> waiting_;
  uint64_t waiting_bytes_ = 0;
  Room copies_{wire::kCopiedLoadsBytes}, messages_{wire::kCopiedBytes};
  Writer message_;
  std::vector<wire::Place> released_;
};

}  // namespace moonpool
