// The process that starts and supervises stubs, and decides all that can be decided outside of the server.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "api.h"
#include "channel.h"
#include "wire.h"

namespace moonpool {

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
  // The next letter; waits for it. Throws Failure where there is none and the launcher is gone, and for one that refuses.
  std::unique_ptr<Letter> next();
  bool is_closed();
  bool is_empty();
  // The last process of the instance that has more memory than it may keep.
  uint64_t grown_generation() const { return grown_generation_; }

 private:
  friend class Launcher;
  void put(std::unique_ptr<Letter> letter);
  void drop_ended();
  void close();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::unique_ptr<Letter>> letters_;
  bool is_closed_ = false;
  std::atomic<uint64_t> grown_generation_{0};
};

// Tells which levels of the server's log are wanted, where that has changed since it was told last. Any thread.
class LogLevels {
 public:
  template <class Tell>
  void tell(const Tell& tell) {
    unsigned levels = kKnown;
    for (const int level : {triton::kInfo, triton::kWarning, triton::kError, triton::kVerbose}) {
      levels |= static_cast<unsigned>(triton::LogIsEnabled(level)) << level;
    }
    if (told_.exchange(levels) == levels) return;
    const auto has = [levels](int level) { return (levels >> level & 1) != 0; };
    tell(has(triton::kInfo), has(triton::kWarning), has(triton::kError), has(triton::kVerbose));
  }

 private:
  static constexpr unsigned kKnown = 1u << 31;
  std::atomic<unsigned> told_{0};
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
  // Send what is led by this number, and wait for the one answer. Throws Failure, as `Mailbox::next`.
  template <wire::Word word, class... Fields>
  std::unique_ptr<Letter> ask(uint64_t number, const Fields&... fields) {
    const auto mailbox = open(number);
    send<word>(number, fields...);
    const Closing closing{*this, number};
    return mailbox->next();
  }
  // Tell which levels of the log are wanted, where that has changed.
  void tell_log_levels() {
    log_levels_.tell([this](auto... levels) { send<wire::Word::LOGGING>(levels...); });
  }
  bool is_gone() const { return is_gone_; }
  // The server has no descriptor, memory or thread for this process of an instance. Its model is not to blame.
  void has_no_room(uint64_t number, uint64_t generation, std::string_view why) {
    send<wire::Word::LOST>(number, generation, false, true, why);
  }

 private:
  struct Closing {
    Launcher& launcher;
    uint64_t number;
    ~Closing() { launcher.close(number); }
  };
  void spawn(const std::string& backend);
  void greet();
  void post(std::string_view packet);
  void listen();
  std::unique_ptr<Letter> receive(Packet& packet, std::string* wrong);
  void deliver(std::unique_ptr<Letter> letter);
  bool is_whole(const Letter& letter);
  void bury();

  Channel channel_;
  int pid_ = -1;
  Descriptor pidfd_;
  std::atomic<bool> is_gone_{false};
  LogLevels log_levels_;
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Mailbox>> mailboxes_;
  std::thread listener_;
};

}  // namespace moonpool
