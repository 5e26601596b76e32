#include "look.h"

#include <sched.h>

#include <algorithm>

#include "wire.h"

namespace moonpool {

namespace {

// A wait takes so much longer than the peer's work if both sides sleep: the time of two wake-ups, on a virtual machine
// whose idle cores were taken from it.
constexpr int64_t kWakeUpsNs = 250'000;
constexpr uint32_t kFewestRests = 63, kMostRests = 4'096;
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

bool Looking::begin(int64_t look_ns, uint64_t own_core, uint64_t peer_core, int64_t now_ns) {
  if (look_ns <= 0 || !was_quick_ || own_core == peer_core || own_core == wire::kNoCore || peer_core == wire::kNoCore) {
    return false;
  }
  if (rests_ > 0) {
    --rests_;
    return false;
  }
  const int most = limit(now_ns);
  if (lookers.fetch_add(1, std::memory_order_relaxed) >= most) {
    lookers.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  looks.made.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Looking::end(bool found) {
  lookers.fetch_sub(1, std::memory_order_relaxed);
  if (found) {
    looks.hits.fetch_add(1, std::memory_order_relaxed);
    most_rests_ = std::max(kFewestRests, most_rests_ / 2);
  } else {
    rests_ = most_rests_;
    most_rests_ = std::min(kMostRests, most_rests_ * 2);
  }
}

void Looking::waited(int64_t look_ns, int64_t taken_ns) { was_quick_ = taken_ns <= look_ns + kWakeUpsNs; }

}  // namespace moonpool
