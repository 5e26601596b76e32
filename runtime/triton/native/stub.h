// The server's side of one process of an instance: its channels, its memory, and the thread that listens to it.
//
// Theory of operation. Two threads work with a stub. The instance's own thread sends batches on the work channel and
// waits for answers there. `listener_` polls the control and calls channels, the pidfd, and an eventfd, by which `wake`
// wakes it.
//
// `listening_` guards everything that is done about the stub's messages. The listener holds it for each round; the
// instance's thread takes it in `catch_up`, to read metrics that the stub sent before its answer. `mutex_` guards the
// few members that any thread may use: the reason of the end, questions, blocks that the model released. It is
// never held while something is read from the stub.
//
// The model may release a block before the answer that says it keeps the block was read, because the two come on
// different channels. Such blocks wait in `released_early_` and are taken back between batches (`take_back_late`).
//
// A stub ends once, for the first reason that `distrust`, the pidfd or a channel gives. The listener sends LOST to the
// launcher unless `leave` came first; if the stub ended before `begin`, `begin` sends it. `death` waits for the
// launcher's reason. The destructor joins the thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
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
  // Takes over the control and calls channels from the launcher. `name` is the instance's, and outlives this. Throws
  // Failure.
  Stub(std::shared_ptr<Launcher> launcher, Mailbox& mailbox, const Model& model, const std::string& name,
       const wire::Born& born, std::vector<Descriptor> descriptors);
  // Ends the thread, and fails open requests.
  ~Stub();

  // Takes over the work channel, too. From now on the end of the stub is reported to the launcher.
  void begin(const wire::Started& started, Descriptor work);
  uint64_t generation() const { return generation_; }

  // Returns the work channel, for the thread that executes.
  const Channel& work() const { return work_; }
  // Note if the stub has requests, before and after a batch.
  void set_executing(bool is_executing) { is_executing_ = is_executing; }
  // Read the messages that a stub with metrics sent before its answer, because a client that has the response may read
  // the metrics. For the instance's thread. Throws Violation.
  void catch_up();
  // Take back blocks that the model kept and released between answers. Only while no batch is out.
  void take_back_late();
  BorrowedBlocks& borrowed_blocks() { return borrowed_blocks_; }
  Answers& answers() { return answers_; }
  OpenRequests& open_requests() { return open_requests_; }

  // Send a message on the control channel, if the stub has not ended. From any thread. Throws Violation if the stub
  // does not read.
  template <wire::Kind kind, class... Fields>
  void send(const Fields&... fields) {
    Writer writer;
    wire::encode<kind>(writer, fields...);
    send_packet(writer.bytes());
  }
  // Send the wanted levels of the log if they have changed.
  void send_log_levels() {
    log_levels_.report([this](auto... levels) { send<wire::Kind::LOGGING>(levels...); });
  }
  // Send CANCEL for requests that nobody waits for any more.
  void send_cancelled();
  // Wake the listener. From any thread.
  void wake() const;
  // False if the process has ended. Throws Failure if the model itself says that it is not ready.
  bool check_ready();

  // End the stub for this reason; the first reason counts. From any thread.
  void distrust(const std::string& why) noexcept;
  // Stop reporting the end of the stub. A report that has begun is complete when this returns.
  void leave();
  // Wait until the process has ended.
  void wait();
  // Ask the launcher to end the process, because a batch takes too long.
  void overdue();
  bool has_ended() const { return has_ended_; }
  // For a stub that has ended or closed a channel: end the rest of it, wait until the listener has stopped, and return
  // the reason. `is_final` is true if the instance was given up for now.
  const Failure& death();
  bool is_final() const { return is_final_; }

  std::shared_ptr<Region> create(wire::Side writer, uint64_t present, uint64_t needed) override;
  void give_back(wire::Side writer, uint64_t region) override;
  void announce(const Region& region, wire::Side writer) override;
  void retire(uint64_t region) override;

 private:
  // The most messages of one channel to read before other channels get their turn.
  static constexpr int kManyMessages = 64;
  // The most denials of one process that are logged.
  static constexpr size_t kMostDenialsLogged = 16;

  void listen() noexcept;
  void listen_until_end();
  int wait_milliseconds();
  bool read_control(int most = kManyMessages);
  bool take_in_control(int most);
  void handle(const Decoded<wire::Kind>& message);
  void log_of_model(const wire::Log& said);
  std::string_view lines_that_may_be_logged(std::string_view text);
  void log_denials(const wire::Denials& denials);
  void grow(uint64_t needed, int64_t device);
  void send_released();
  void tidy();
  void report() noexcept;
  void send_packet(std::string_view packet, int descriptor = -1);

  const std::shared_ptr<Launcher> launcher_;
  Mailbox& mailbox_;
  const Model& model_;
  const std::string& name_;
  const uint64_t instance_;
  const uint64_t generation_;
  Channel work_, control_;
  Descriptor pidfd_, wakes_;
  std::atomic<uint64_t> next_region_;
  BorrowedBlocks borrowed_blocks_;
  Answers answers_;
  OpenRequests open_requests_;
  const std::shared_ptr<Calls> calls_;
  // Guards the members down to `packet_`, and all work on the stub's messages.
  std::mutex listening_;
  std::vector<wire::Place> released_;
  std::optional<wire::Grow> growth_;  // a request for memory that is not answered yet
  // The budget of lines of its log.
  Budget log_lines_;
  // Denials that were logged: kind and text.
  std::set<std::pair<uint64_t, std::string>> denials_logged_;
  RateLimiter rate_limiter_;
  uint64_t lines_left_out_ = 0;
  Packet packet_;

  std::atomic<bool> is_executing_{false};
  std::atomic<bool> has_ended_{false};
  LogLevels log_levels_;
  bool has_is_ready_ = false;

  // Guards the members down to `is_stopping_`.
  std::mutex mutex_;
  std::condition_variable answered_;
  // Blocks that the model released, perhaps before the answer that says that it keeps them was read.
  std::vector<wire::Place> released_early_;
  uint64_t question_ = 0, answered_question_ = 0;
  std::optional<std::string> reason_;
  std::string why_;
  bool has_begun_ = false, is_stopping_ = false;

  std::optional<Failure> death_;
  bool is_final_ = false;
  std::thread listener_;
};

}  // namespace moonpool
