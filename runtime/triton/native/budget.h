// How much of something there may be: so much a second, saved up for one second at most. One thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace moonpool {

using Clock = std::chrono::steady_clock;

class Budget {
 public:
  explicit Budget(double per_second) : per_second_(per_second), left_(per_second) {}

  // Whether one more may be, which counts as so many: a large one is paid for by those that come after it.
  bool spend(double cost) {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - at_).count();
    at_ = now;
    left_ = std::min(per_second_, left_ + seconds * per_second_);
    if (left_ < 1) return false;
    left_ -= cost;
    return true;
  }

 private:
  const double per_second_;
  double left_;
  Clock::time_point at_ = Clock::now();
};

// How much a stub may say on one channel before it has to wait, as runtime/flow.py has it: what is not read blocks the
// stub that wrote it, and nobody else.
class Flow {
 public:
  // Something of that size was received, which costs as much as so many messages beside.
  void took(size_t size_bytes, double messages = 1) {
    unpaid_ += messages + static_cast<double>(size_bytes / kMessageBytes);
  }
  // Of a message in memory, which is copied and looked through, and otherwise costs nothing.
  static double cost_of_stored(uint64_t size_bytes) { return static_cast<double>(size_bytes) / kStoredBytes; }
  // After a round of receiving: the next one is later where this was too much.
  void settle() {
    if (unpaid_ > 0 && !budget_.spend(unpaid_)) {
      paused_until_ = Clock::now() + kPause;
    }
    unpaid_ = 0;
  }
  // How long nothing is to be read; 0 where it may be.
  int pause_milliseconds() const {
    const auto left = paused_until_ - Clock::now();
    if (left.count() <= 0) return 0;
    return 1 + static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
  }

 private:
  // More than a model in Python can have to say. What is long counts as several.
  static constexpr double kMessagesPerSecond = 20'000;
  static constexpr size_t kMessageBytes = 512, kStoredBytes = 16 << 10;
  static constexpr auto kPause = std::chrono::milliseconds(20);
  Budget budget_{kMessagesPerSecond};
  double unpaid_ = 0;
  Clock::time_point paused_until_{};
};

}  // namespace moonpool
