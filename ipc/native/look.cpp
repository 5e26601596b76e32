#include "look.h"

#include <sched.h>

#include <algorithm>

#include "wire.h"

namespace moonpool {

namespace {

// A wait takes so much longer than the peer's work if both sides sleep: the time of two wake-ups, on a virtual machine
// whose idle cores were taken from it.
constexpr int64_t kWakeUpsNs = 250'000;
constexpr uint32_t kFewestRests = 63, kMostRests = 4'096, kMostLongLooks = 64;
// The cores of the process are counted again after so long.
constexpr int64_t kCountNs = 1'000'000'000;

std::atomic<int> lookers{0};
std::atomic<int> most_lookers{0};
std::atomic<int64_t> counted_ns{-kCountNs};

// Returns how many threads of this process may look at once.
int limit(int64_t now_ns) {
  if (now_ns - counted_ns.load(std::memory_order_relaxed) >= kCountNs) {
    counted_ns.store(now_ns, std::memory_order_relaxed);
    cpu_set_t cores;
    // A machine with more cores than the set has room for has enough of them.
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : CPU_SETSIZE;
    most_lookers.store(count - 1, std::memory_order_relaxed);
  }
  return most_lookers.load(std::memory_order_relaxed);
}

}  // namespace

Looks looks;

int64_t Looking::begin(int64_t look_ns, uint64_t own_core, uint64_t peer_core, bool peer_looks, int64_t now_ns) {
  if (look_ns <= 0 || !was_quick_ || own_core == peer_core || own_core == wire::kNoCore || peer_core == wire::kNoCore) {
    return 0;
  }
  was_asked_ = peer_looks && !is_deaf_;
  if (rests_ > 0) {
    if (!was_asked_) {
      if (--rests_ == 0) is_deaf_ = false;
      return 0;
    }
    rests_ = 0;
  }
  const int most = limit(now_ns);
  if (lookers.fetch_add(1, std::memory_order_relaxed) >= most) {
    lookers.fetch_sub(1, std::memory_order_relaxed);
    return 0;
  }
  looks.made.fetch_add(1, std::memory_order_relaxed);
  return long_looks_ > 0 ? look_ns + kWakeUpsNs / 2 : look_ns;
}

void Looking::end(int64_t look_ns, int64_t taken_ns, bool found) {
  lookers.fetch_sub(1, std::memory_order_relaxed);
  if (!found) {
    rests_ = most_rests_;
    most_rests_ = std::min(kMostRests, most_rests_ * 2);
    long_looks_ = kMostLongLooks;
    // A peer that looks and then does not answer soon is not asked again before that.
    is_deaf_ = was_asked_;
    return;
  }
  looks.hits.fetch_add(1, std::memory_order_relaxed);
  if (taken_ns <= look_ns) {
    most_rests_ = std::max(kFewestRests, most_rests_ / 2);
    long_looks_ = kMostLongLooks;
  } else if (long_looks_ > 0) {
    --long_looks_;
  }
}

void Looking::waited(int64_t look_ns, int64_t taken_ns) { was_quick_ = taken_ns <= look_ns + kWakeUpsNs; }

}  // namespace moonpool
