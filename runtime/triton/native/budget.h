// How much of something there may be: so much a second, saved up for one second at most. One thread at a time.
#pragma once

#include <algorithm>
#include <chrono>

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

}  // namespace moonpool
