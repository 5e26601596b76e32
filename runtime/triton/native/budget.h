// Limits of what one stub may send: a budget per second, the copies that exist at once, and a rate limiter.
//
// None of these classes has a lock. Their owners use each from one thread, or under a lock of their own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "wire.h"

namespace moonpool {

using Clock = std::chrono::steady_clock;

// A budget per second. It saves what was not spent for at most one second.
class Budget {
 public:
  explicit Budget(double per_second) : per_second_(per_second), left_(per_second) {}

  // Spend `cost`. Returns false if nothing is left. A large cost may push the budget below zero, which delays later
  // ones.
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

// Bounds the bytes of a stub's messages and strings that are copied and not answered yet.
class CopyBudget {
 public:
  explicit CopyBudget(uint64_t most) : most_(most) {}
  uint64_t taken() const { return taken_; }
  uint64_t most() const { return most_; }
  // Count another copy of a question that has `own` bytes already. Returns false over the bound. One question may
  // exceed the bound if it is the only one.
  bool take(uint64_t size, uint64_t own = 0) {
    if (taken_ > own && taken_ + size > most_) return false;
    taken_ += size;
    return true;
  }
  void give_back(uint64_t size) { taken_ -= size; }

 private:
  const uint64_t most_;
  uint64_t taken_ = 0;
};

// Rate limiter for the channels of one stub, as in runtime/stubs/control.py and with its numbers. Over budget, none of
// them is read, which blocks only that stub.
class RateLimiter {
 public:
  // Count a received message: it costs `messages`, and more for its size.
  void took(size_t size_bytes, double messages = 1) {
    unpaid_ += messages + static_cast<double>(size_bytes / wire::kMessageBytes);
  }
  // Charge for a round of receiving. Over budget, nothing is read until the stub is back in it.
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
  // Milliseconds until the channels may be read again; 0 if they may be read now.
  int pause_milliseconds() const {
    const auto left = paused_until_ - Clock::now();
    if (left.count() <= 0) return 0;
    return 1 + static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
  }

 private:
  static constexpr auto kPause = std::chrono::milliseconds(wire::kPauseMs);
  static constexpr double kPerSecond = wire::kMessagesPerS;
  // Messages that may still come now, at most those of one second. Negative while the stub is over budget.
  double left_ = kPerSecond;
  Clock::time_point at_ = Clock::now();
  double unpaid_ = 0;
  Clock::time_point paused_until_{};
};

}  // namespace moonpool
