// How much of something there may be: so much a second, saved up for one second at most. One thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "wire.h"

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

// Bounds the copies of a stub's messages and strings that exist at once. Not for several threads.
class Room {
 public:
  explicit Room(uint64_t most) : most_(most) {}
  uint64_t taken() const { return taken_; }
  // Count another copy; false if there is no room. One may be larger than the bound, but only alone.
  bool take(uint64_t size) {
    if (taken_ > 0 && taken_ + size > most_) return false;
    taken_ += size;
    return true;
  }
  void give_back(uint64_t size) { taken_ -= size; }

 private:
  const uint64_t most_;
  uint64_t taken_ = 0;
};

// Rate limiter for one channel, as in runtime/flow.py and with its numbers. Over budget the channel is not read, which
// blocks only the stub that writes to it.
class Flow {
 public:
  // Something of that size was received, which costs as much as so many messages beside.
  void took(size_t size_bytes, double messages = 1) {
    unpaid_ += messages + static_cast<double>(size_bytes / wire::kMessageBytes);
  }
  // Charge for a round of receiving. Over budget, the channel is not read until the stub is back in it.
  void settle() {
    if (unpaid_ == 0) return;
    const auto now = Clock::now();
    const double saved = left_ + std::chrono::duration<double>(now - at_).count() * kPerSecond;
    left_ = std::min(kPerSecond, saved) - unpaid_;
    at_ = now;
    unpaid_ = 0;
    if (left_ >= 0) return;
    const std::chrono::duration<double> owed(-left_ / kPerSecond);
    paused_until_ = now + std::max<Clock::duration>(kPause, std::chrono::duration_cast<Clock::duration>(owed));
  }
  // How long nothing is to be read; 0 where it may be.
  int pause_milliseconds() const {
    const auto left = paused_until_ - Clock::now();
    if (left.count() <= 0) return 0;
    return 1 + static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
  }

 private:
  static constexpr auto kPause = std::chrono::milliseconds(wire::kPauseMs);
  static constexpr double kPerSecond = wire::kMessagesPerS;
  // The messages that may come at once: those of one second at most, negative while the stub is over budget.
  double left_ = kPerSecond;
  Clock::time_point at_ = Clock::now();
  double unpaid_ = 0;
  Clock::time_point paused_until_{};
};

}  // namespace moonpool
