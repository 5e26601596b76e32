// One process of an instance, as the server has it: its channels, its memory, and the thread that listens to it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "api.h"
#include "budget.h"
#include "calls.h"
#include "channel.h"
#include "launcher.h"
#include "memory.h"
#include "model.h"
#include "open_requests.h"
#include "wire.h"

namespace moonpool {

class Stub final : public RegionSource {
 public:
  // Takes over the control and calls channels, as the launcher says. `name` is the instance's, and outlives this. Throws
  // Failure.
  Stub(std::shared_ptr<Launcher> launcher, Mailbox& mailbox, const Model& model, const std::string& name,
       const wire::Born& born, std::vector<Descriptor> descriptors);
  // Ends the thread. What is open is failed.
  ~Stub();

  // Takes over the work channel, too. From now on its end is told to the launcher.
  void begin(const wire::Started& started, Descriptor work);
  uint64_t generation() const { return generation_; }

  // The work channel, for the thread that executes.
  const Channel& work() const { return work_; }
  // Around a batch: whether the stub has requests.
  void set_executing(bool is_executing) { is_executing_ = is_executing; }
  // Take in what a stub with metrics told before it answered: whoever has the response may look for them. For the thread
  // that executes. Throws Violation.
  void catch_up();
  // What the model kept and let go of while it had nothing to answer. When no batch is out.
  void take_back_late();
  Loans& loans() { return loans_; }
  Answers& answers() { return answers_; }
  OpenRequests& open_requests() { return open_requests_; }

  // Send a message on the control channel; nothing where the stub is gone. From any thread. Throws Violation for a stub
  // that does not read.
  template <wire::Kind kind, class... Fields>
  void tell(const Fields&... fields) {
    Writer writer;
    wire::encode<kind>(writer, fields...);
    tell_packet(writer.bytes());
  }
  // Tell which levels of the log are wanted, where that has changed.
  void tell_log_levels() {
    log_levels_.tell([this](auto... levels) { tell<wire::Kind::LOGGING>(levels...); });
  }
  // Tell of requests that nobody waits for any more.
  void tell_cancelled();
  // Have somebody look again at what there is to do while nothing comes. From any thread.
  void wake() const;
  // False if the process has ended. Throws Failure if the model itself says that it is not ready.
  bool check_ready();

  // End it, for this reason; the first one counts. From any thread.
  void distrust(const std::string& why) noexcept;
  // Its end is not to be told any more; whoever tells of it already has done so when this returns.
  void leave();
  // Until the process has ended.
  void wait();
  // Ask for its end because a batch takes too long.
  void overdue();
  bool has_ended() const { return has_ended_; }
  // For a stub that has ended, or closed a channel: ends what is left of it, and waits until nobody listens to it any
  // more. Why it ended, and whether the instance was given up for now.
  const Failure& death();
  bool is_final() const { return is_final_; }

  std::shared_ptr<Region> create(wire::Side writer, uint64_t present, uint64_t needed) override;
  void give_back(wire::Side writer, uint64_t region) override;
  void announce(const Region& region, wire::Side writer) override;
  void retire(uint64_t region) override;

 private:
  // Messages of one channel that are read before others have their turn.
  static constexpr int kManyMessages = 64;

  void listen() noexcept;
  void listen_until_end();
  int wait_milliseconds();
  bool read_control(int most = kManyMessages);
  bool take_in_control(int most);
  void handle(const Decoded<wire::Kind>& message);
  void log_of_model(const wire::Log& line);
  void grow(uint64_t needed, int64_t device);
  void tell_released();
  void tidy();
  void report() noexcept;
  void tell_packet(std::string_view packet, int descriptor = -1);

  const std::shared_ptr<Launcher> launcher_;
  Mailbox& mailbox_;
  const Model& model_;
  const std::string& name_;
  const uint64_t instance_;
  const uint64_t generation_;
  Channel work_, control_;
  Descriptor pidfd_, wakes_;
  std::atomic<uint64_t> next_region_;
  Loans loans_;
  Answers answers_;
  OpenRequests open_requests_;
  const std::shared_ptr<Calls> calls_;
  // Guards what follows, and all that is done about what the stub says: while a batch is answered, two may listen.
  std::mutex listening_;
  std::vector<wire::Place> released_;
  std::optional<wire::Grow> growth_;  // that was asked for and not answered yet
  // Lines that it may log, and how many more it did.
  Budget log_lines_;
  Flow flow_;
  uint64_t lines_left_out_ = 0;
  Packet packet_;

  std::atomic<bool> is_executing_{false};
  std::atomic<bool> has_ended_{false};
  LogLevels log_levels_;
  bool has_is_ready_ = false;

  // Guards what follows.
  std::mutex mutex_;
  std::condition_variable answered_;
  // Blocks that the model let go of; the answer that says that it keeps them may not have been read yet.
  std::vector<wire::Place> let_go_;
  uint64_t question_ = 0, answered_question_ = 0;
  std::optional<std::string> reason_;
  std::string why_;
  bool has_begun_ = false, is_stopping_ = false;

  std::optional<Failure> death_;
  bool is_final_ = false;
  std::thread listener_;
};

}  // namespace moonpool
