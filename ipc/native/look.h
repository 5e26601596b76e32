// Decides if a thread looks for the next message for a moment before it sleeps. Knows nothing of Python.
//
// A thread that sleeps is woken by its peer and by the kernel, which takes longer than a quick model. Looking saves
// that, and costs processor time that others could use. So a thread looks only
//   - if the last message came from another core: on its own, the peer could not run meanwhile;
//   - if the last wait was short enough for a look to have helped, wake-ups included;
//   - if few looks were in vain lately. After one the next 63 waits go without, after the next one twice as many, up to
//     4,096, and after a success half as many;
//   - if the process has another core for its other threads. At most one looker fewer than it has cores looks.
// All of it is a matter of time alone: a peer that lies about its core costs some microseconds of one thread.
//
// Both sides have to begin. While one of them sleeps, each of its messages comes as late as it is woken. Where that is
// later than a look ends, two sides that would be quick together never meet. So the first looks after a pause are
// longer, by the time of a wake-up; and a side whose peer looks at the moment of a message ends its own pause. Messages
// that still come late cost 64 long looks, and then one in vain.
#pragma once

#include <atomic>
#include <cstdint>

namespace moonpool {

// Lets a core's other thread go on, for a thread that looks again and again.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How often threads of this process looked, and how often a message came meanwhile.
struct Looks {
  std::atomic<uint64_t> made{0}, hits{0};
};
extern Looks looks;

// The looks of one end of a channel. One thread at a time.
class Looking {
 public:
  // Begins a wait. `peer_looks` says that the peer was looking when our last message came. Returns for how long the
  // thread looks: if that is not 0, it calls `end` and nothing else next.
  int64_t begin(int64_t look_ns, uint64_t own_core, uint64_t peer_core, bool peer_looks, int64_t now_ns);
  // Ends a look, which found a message after `taken_ns`, or did not.
  void end(int64_t look_ns, int64_t taken_ns, bool found);
  // Notes how long a whole wait took.
  void waited(int64_t look_ns, int64_t taken_ns);

 private:
  bool was_quick_ = true, was_asked_ = false, is_deaf_ = false;
  uint32_t rests_ = 0, most_rests_ = 63, long_looks_ = 64;
};

}  // namespace moonpool
