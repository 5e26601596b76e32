// The process that starts and supervises stubs, and decides everything that can be decided outside of the server.
//
// Theory of operation. One thread, `listener_`, reads the launcher's messages and puts each into the mailbox of the
// model, instance or question that it is about. Any thread may send, or wait at a mailbox. `mutex_` guards the table of
// mailboxes; each mailbox has a lock and a condition of its own, so a waiter never holds the table.
//
// The end of the channel means that the launcher is dead, and all its stubs with it. The listener then reaps the
// process, sets `is_gone_` and closes every mailbox under `mutex_`; a mailbox that is opened later is closed at
// once. So no thread waits for an answer that cannot come. The next use of a model starts another launcher
// (`BackendState`).
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

// A message from the launcher about one model or instance, checked against the tables.
struct LauncherMessage {
  wire::Word word;
  std::string packet;
  Reader fields;  // in the packet
  std::vector<Descriptor> descriptors;
};

// The messages about one model or instance, in order. Any thread may use it.
class Mailbox {
 public:
  // Waits for the next message. Throws Failure if none is left and the launcher is gone, and if the message is a
  // refusal.
  std::unique_ptr<LauncherMessage> next();
  bool is_closed();
  bool is_empty();
  // The last process of the instance that has more memory than it may keep.
  uint64_t grown_generation() const { return grown_generation_; }

 private:
  friend class Launcher;
  void put(std::unique_ptr<LauncherMessage> message);
  void drop_ended();
  void close();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::unique_ptr<LauncherMessage>> messages_;
  bool is_closed_ = false;
  std::atomic<uint64_t> grown_generation_{0};
};

// Reports the wanted levels of the server's log if they have changed since the last report. Any thread may call it.
class LogLevels {
 public:
  template <class Send>
  void report(const Send& send) {
    unsigned levels = kKnown;
    for (const int level : {triton::kInfo, triton::kWarning, triton::kError, triton::kVerbose}) {
      levels |= static_cast<unsigned>(triton::LogIsEnabled(level)) << level;
    }
    if (reported_.exchange(levels) == levels) return;
    const auto has = [levels](int level) { return (levels >> level & 1) != 0; };
    send(has(triton::kInfo), has(triton::kWarning), has(triton::kError), has(triton::kVerbose));
  }

 private:
  static constexpr unsigned kKnown = 1u << 31;
  std::atomic<unsigned> reported_{0};
};

// One launcher. Its stubs end with it, and it ends with this process. Any thread may call any method.
class Launcher {
 public:
  // Start the process, and send it the backend. Throws Failure.
  Launcher(const std::string& backend, const std::string& directory, const std::string& config);
  // Waits until the process has ended.
  ~Launcher();

  // Returns a new number for a model or an instance, and opens the mailbox of a number.
  static uint64_t new_number();
  std::shared_ptr<Mailbox> open(uint64_t number);
  void close(uint64_t number);

  template <wire::Word word, class... Fields>
  void send(const Fields&... fields) {
    Writer writer;
    wire::encode<word>(writer, fields...);
    post(writer.bytes());
  }
  // Send a message that begins with this number, and wait for its one answer. Throws Failure, as `Mailbox::next`.
  template <wire::Word word, class... Fields>
  std::unique_ptr<LauncherMessage> ask(uint64_t number, const Fields&... fields) {
    const auto mailbox = open(number);
    send<word>(number, fields...);
    const Closing closing{*this, number};
    return mailbox->next();
  }
  // Send the wanted levels of the log if they have changed.
  void send_log_levels() {
    log_levels_.report([this](auto... levels) { send<wire::Word::LOGGING>(levels...); });
  }
  bool is_gone() const { return is_gone_; }
  // Report that the server has no descriptor, memory or thread for a process. The model is not to blame.
  void report_shortage(uint64_t number, uint64_t generation, std::string_view why) {
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
  std::unique_ptr<LauncherMessage> receive(Packet& packet, std::string* wrong);
  void deliver(std::unique_ptr<LauncherMessage> message);
  bool is_whole(const LauncherMessage& message);
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
