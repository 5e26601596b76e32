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
  // Begins a wait. Returns true if the thread looks: it then calls `end` and nothing else next.
  bool begin(int64_t look_ns, uint64_t own_core, uint64_t peer_core, int64_t now_ns);
  // Ends a look that found a message, or did not.
  void end(bool found);
  // Notes how long a whole wait took.
  void waited(int64_t look_ns, int64_t taken_ns);

 private:
  bool was_quick_ = true;
  uint32_t rests_ = 0, most_rests_ = 63;
};

}  // namespace moonpool
