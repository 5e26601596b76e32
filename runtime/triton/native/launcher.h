// The process that starts and supervises stubs, and decides all that can be decided outside of the server.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "channel.h"
#include "wire.h"

namespace moonpool {

using Clock = std::chrono::steady_clock;

// A message of the launcher's about one model or instance, accepted by the tables.
struct Letter {
  wire::Word word;
  std::string packet;
  Reader fields;  // in the packet
  std::vector<Descriptor> descriptors;
};

// The letters about one model or instance, in order. Any thread.
class Mailbox {
 public:
  // The next letter; waits for it. None when the launcher is gone and has left none, or when the time is over.
  std::unique_ptr<Letter> next(std::optional<Clock::time_point> deadline = {});
  // Without waiting.
  std::unique_ptr<Letter> take();
  bool is_closed();
  // The last process of the instance that has more memory than it may keep.
  uint64_t grown_generation() const { return grown_generation_; }

 private:
  friend class Launcher;
  void put(std::unique_ptr<Letter> letter);
  void close();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::unique_ptr<Letter>> letters_;
  bool is_closed_ = false;
  std::atomic<uint64_t> grown_generation_{0};
};

// One launcher. Its end is the end of its stubs, and ours is the end of it. Any thread may call any method.
class Launcher {
 public:
  // Start the process, and say for which backend it is. Throws Failure.
  Launcher(const std::string& backend, const std::string& directory, const std::string& config);
  // Waits until the process is gone.
  ~Launcher();

  // A number for a model or an instance, and what is said of it.
  static uint64_t new_number();
  std::shared_ptr<Mailbox> open(uint64_t number);
  void close(uint64_t number);

  template <wire::Word word, class... Fields>
  void send(const Fields&... fields) {
    Writer writer;
    wire::encode<word>(writer, fields...);
    post(writer.bytes());
  }
  // Tell which levels of the log are wanted, where that has changed.
  void tell_log_levels();
  bool is_gone() const { return is_gone_; }

 private:
  void spawn();
  void post(std::string_view packet);
  void listen();
  std::unique_ptr<Letter> receive(Packet& packet, std::string* wrong);
  void deliver(std::unique_ptr<Letter> letter);
  void bury();

  Channel channel_;
  int pid_ = -1;
  Descriptor pidfd_;
  std::atomic<bool> is_gone_{false};
  std::atomic<unsigned> log_levels_{0};
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Mailbox>> mailboxes_;
  Mailbox greeting_;
  std::thread listener_;
};

// Which levels of the server's log are on: a bit for each.
unsigned log_levels();

}  // namespace moonpool
