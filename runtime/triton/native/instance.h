// An instance of a model: the processes that serve it, one after another.
//
// Theory of operation. The server calls `execute` on the instance's own thread, which also starts, renews and replaces
// the process. One other thread uses `stub_`, the pointer to the current process, to ask for readiness. So `mutex_`
// guards just that pointer, and a shared_ptr keeps the process while it is asked.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "api.h"
#include "batch.h"
#include "launcher.h"
#include "model.h"
#include "stub.h"

namespace moonpool {

class Instance {
 public:
  // Starts the first process. Throws Failure with the reason why it does not run.
  Instance(triton::ModelInstance* instance, Model& model)
      : model_(model), kind_(kKinds[kind_of(instance) & 3]), batch_(instance, model, kind_ != "CPU") {
    const char* name;
    check(triton::ModelInstanceName(instance, &name));
    check(triton::ModelInstanceDeviceId(instance, &device_));
    name_ = name;
    start();
  }

  // Lets the model finalize, and waits until its process has ended.
  ~Instance() {
    if (!launcher_) return;
    if (stub_) stub_->leave();
    try {
      launcher_->send<wire::Word::END>(number_);
      while (mailbox_->next()->word != wire::Word::ENDED) {
      }
    } catch (const Failure&) {  // then it has ended with the launcher
    }
    launcher_->close(number_);
  }

  // Executes one batch, on the instance's thread. If it throws Failure, it left the requests alone; otherwise it
  // answered or released all of them.
  void execute(triton::Request** requests, uint32_t count) {
    Stub* taken = &stub();
    batch_.gather(requests, count);
    if (batch_.is_empty()) return;
    try {
      for (int attempt = 1; !batch_.give(*taken); ++attempt) {
        const Failure death = taken->death();
        taken = nullptr;
        if (attempt == kAttempts) throw death;
        taken = &stub();
      }
      batch_.finish(*taken);
    } catch (const Failure& failure) {
      batch_.fail(failure, taken);
    } catch (const std::exception& violation) {
      taken->distrust(violation.what());
      batch_.fail(taken->death(), taken);
    }
    if (taken) taken->set_executing(false);
    batch_.close();
    if (!taken) return;
    served_ += count;
    if (is_due(*taken)) renew(*taken);
  }

  // Checks that the process runs and that its model says that it is ready. From any thread. Throws Failure with the
  // reason.
  void check_ready() {
    std::shared_ptr<Stub> stub;
    {
      std::lock_guard lock(mutex_);
      stub = stub_;
    }
    if (!stub || !stub->check_ready()) {
      throw Failure(triton::kInternal, "Stub process '" + name_ + "' is not healthy.");
    }
  }

 private:
  static constexpr const char* kKinds[] = {"AUTO", "CPU", "GPU", "MODEL"};
  using Clock = std::chrono::steady_clock;
  // The pause between failed starts, as in RestartPolicy of runtime/process/restart.py.
  static constexpr std::chrono::milliseconds kFirstPause{100}, kMostPause{60'000};
  // The most processes to try for one batch, if they have ended when it is sent.
  static constexpr int kAttempts = 3;

  static int kind_of(triton::ModelInstance* instance) {
    int kind;
    check(triton::ModelInstanceKind(instance, &kind));
    return kind;
  }

  // Returns the process that takes batches. Waits for a process that is being started.
  Stub& stub() {
    if (stub_ && !stub_->has_ended()) return *stub_;
    if (stub_) {
      const Failure death = stub_->death();
      const bool is_final = stub_->is_final();
      replace(nullptr);
      if (is_final) end_ = death;
    }
    if (mailbox_->is_closed()) {
      start_anew();
    } else {
      // An instance that was given up gets a message again after its pause.
      if (end_ && mailbox_->is_empty()) throw *end_;
      replace(started());
    }
    end_.reset();
    return *stub_;
  }

  // Starts anew, but not for every request, because starting a launcher and a process takes long. Throws Failure.
  void start_anew() {
    const auto now = Clock::now();
    if (now < next_start_) throw *end_;
    try {
      start();
    } catch (const std::exception& error) {
      const auto pause = std::min(kMostPause, kFirstPause * (1 << std::min(failed_starts_++, 20)));
      next_start_ = Clock::now() + pause;
      const auto* failure = dynamic_cast<const Failure*>(&error);
      end_ = failure ? *failure : Failure(triton::kUnavailable, error.what());
      throw *end_;
    }
    failed_starts_ = 0;
  }

  // Have a launcher start the instance for the first time. If this throws Failure, the mailbox is closed.
  void start() {
    uint64_t model;
    launcher_ = model_.launcher(&model);
    launcher_->send_log_levels();
    number_ = Launcher::new_number();
    mailbox_ = launcher_->open(number_);
    launcher_->send<wire::Word::INSTANCE>(number_, model, name_, kind_, static_cast<uint64_t>(device_));
    try {
      replace(started());
    } catch (...) {  // the next request tries again
      launcher_->close(number_);
      launcher_ = nullptr;
      throw;
    }
  }

  // Waits for a process that takes batches.
  std::shared_ptr<Stub> started() {
    std::shared_ptr<Stub> stub;
    for (;;) {
      const auto message = mailbox_->next();
      if (message->word == wire::Word::BORN) {
        const wire::Born born(message->fields);
        try {
          stub = std::make_shared<Stub>(launcher_, *mailbox_, model_, name_, born, std::move(message->descriptors));
        } catch (const std::exception& error) {  // the listener reports its end as any other
          stub = nullptr;
          launcher_->report_shortage(number_, born.generation, error.what());
        }
      } else if (message->word == wire::Word::STARTED && stub) {
        stub->begin(wire::Started(message->fields), std::move(message->descriptors.at(0)));
        return stub;
      } else if (message->word == wire::Word::DIED) {
        stub = nullptr;
        const wire::Died died(message->fields);
        // The later error says more.
        if (died.restarts_in_ms || !mailbox_->is_empty()) continue;
        end_.emplace(static_cast<int>(died.code), std::string(died.message));
        throw *end_;
      }
    }
  }

  // Returns true if a process has served long enough. A process with open requests serves on.
  bool is_due(Stub& stub) const {
    const auto most = model_.facts().recycle_requests;
    const bool is_enough = most && served_ >= *most;
    return (is_enough || mailbox_->grown_generation() == stub.generation()) && !stub.has_ended() &&
           !stub.open_requests().are_open();
  }

  // Have the next process started now, before a request waits for it.
  void renew(Stub& stub) noexcept {
    // The launcher answers one of LOST and RENEW for each generation, so the order matters.
    stub.leave();
    launcher_->send<wire::Word::RENEW>(number_, stub.generation(), served_);
    stub.wait();
    replace(nullptr);
  }

  void replace(std::shared_ptr<Stub> stub) {
    served_ = 0;
    {
      std::lock_guard lock(mutex_);
      stub_.swap(stub);
    }
    // The previous process ends here, as the last pointer to it goes.
  }

  const Model& model_;
  std::string name_, kind_;
  int32_t device_ = 0;
  uint64_t number_ = 0;
  // The number of requests that the current process has executed.
  uint64_t served_ = 0;
  std::shared_ptr<Launcher> launcher_;
  std::shared_ptr<Mailbox> mailbox_;
  Batch batch_;
  // The reason why there is no process, unless another one is being started.
  std::optional<Failure> end_;
  // Starts that failed in a row after a launcher's end, and the earliest time of the next one.
  int failed_starts_ = 0;
  Clock::time_point next_start_{};

  std::mutex mutex_;  // guards the pointer
  std::shared_ptr<Stub> stub_;
};

}  // namespace moonpool
