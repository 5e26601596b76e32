// One end of a work channel in memory: a slot for messages each way, and pipes as bells. Knows nothing of Python.
//
// Theory of operation. The work channel is lockstep: a side sends a message after it has read the one of its peer. So
// one message is on its way, and a slot with a number is enough; there are no indexes. Each side has a memfd that it
// alone writes: its words, and the bytes of its last message, which are the packet that a socket would carry.
//
//   send n:     bytes, size, core, `seq` = n; then, if the peer's `asleep` is set, a byte into its bell.
//   receive n:  if the peer's `seq` is n, read `size` once, bound it, copy the bytes. Otherwise sleep on the own bell.
//
// `asleep` is set all the time but while a thread looks (`look.h`), so that each message wakes who watches the
// descriptor of the bell, such as an event loop. A look clears it, sets it, and looks once more. `seq` of one side and
// `asleep` of the other are written and read in one total order: either the sender sees `asleep`, or the looker sees
// `seq`.
//
// A message about large tensors comes after a copy, and to wake a peer that sleeps takes about as long as to copy a
// megabyte. So the sender announces the message before the last one: `announced` is the number of that message, and the
// bell is rung if `asleep` is kAsleepWaiting, as a thread sets it that waits on another core. A thread that finds the
// announcement looks for the message, or for longer than it would have looked.
//
// A ring may be late, or for a message that a look has found already. So a ring means only: look. `check` empties the
// bell and looks, for those who were woken by the descriptor and must not block. They take the message in the same
// step, since the bell does not tell of it again.
//
// What the peer can do. Its memory is hostile: `seq` is compared for equality with our own number and is no index, the
// size is read once and bounded, and only the copy is parsed. A number that is neither that of the next message nor of
// the last one ends the conversation, and so does a size that no packet has. Its `asleep` costs a ring or its own
// sleep, and its `announced` one look. It may ring as it likes; after 64 rings in a row without a message the
// conversation is over. Our bell is in non-blocking mode, and so are our ends of both bells for writing, each of which
// is a file description of its own: the peer changes no flag of them. A full bell is rung. We keep the other end of the
// peer's bell open: a write can then raise no SIGPIPE. The peer cannot write to our memory, which is sealed against
// writing, nor change the size of its own. Holes in it read as zeros.
//
// A side tells which message it has taken last. What was sent to a process that was dead already, or died before it
// woke, can so be given to another one.
//
// The end. Neither a death nor a close depends on an end of file, nor on who inherited which descriptor. The runtime
// sees the death of a stub by its pidfd and calls `end`, which rings our own bell; it stays rung. A message that was
// whole by then is still received. A stub is ended by its control channel or by the kernel when the runtime dies.
// Somebody of our own user could open a pipe again and take a byte away; so the maker never sleeps longer than a
// second at a time.
//
// Threads. One thread at a time sends and receives; `end` is for any. The maker's memory does not exist in a process
// that is forked from it, where every method fails: `is_open` is false there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "channel.h"
#include "look.h"
#include "wire.h"

namespace moonpool {

// The words of one side, each in a cache line of its own, of any machine.
struct SlotWords {
  alignas(128) std::atomic<uint64_t> seq;
  // The number of the message that comes next, if it was announced.
  std::atomic<uint64_t> announced;
  alignas(128) std::atomic<uint32_t> asleep;
  alignas(128) std::atomic<uint32_t> size;
  std::atomic<uint32_t> core;
  // The number of the last message of the peer that this side has taken.
  alignas(128) std::atomic<uint64_t> taken;
};
// Of `asleep`; 0 if a thread looks.
constexpr uint32_t kAsleep = 1, kAsleepWaiting = 2;
// A message is announced before the last bytes of its tensors are copied: so many.
constexpr size_t kAnnouncedBytes = size_t{1} << 20;
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// A page of words, and the room for a packet.
constexpr size_t kSlotPage = 4096, kSlotBytes = kSlotPage + wire::kMaxPacketBytes;
static_assert(sizeof(SlotWords) <= kSlotPage);

class Slots {
 public:
  enum class Got : int { kMessage, kNothing, kInterrupted, kEnded, kBroken };
  // What goes to the peer: the maker's memory, the peer's, the end of the peer's bell to read from, that of the
  // maker's to write to.
  struct Offer {
    Descriptor makers, peers, bell, ring;
  };

  Slots() = default;
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;
  ~Slots() { close(); }

  // Makes both memories and both bells. Returns false, with errno, if the kernel cannot: it lacks descriptors or
  // memory, or is older than 5.1.
  bool make(Offer& offer);
  // Takes the other end, and owns the descriptors of the offer. Returns false, with errno, if they are not what they
  // should be.
  bool take(int makers, int peers, int bell, int ring);

  bool is_open() const;
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }
  // The descriptor that is readable when the peer has rung, -1 if this end is closed.
  int fd() const { return is_open() ? bell_.get() : -1; }

  // Sends a message of 1 to kMaxPacketBytes bytes. Never blocks. To be called when the peer's last message was taken.
  // Returns false if the bell cannot be rung any more: it was closed.
  bool send(std::string_view packet);
  // Copies what the next message is about, and announces the message before the end. Never blocks. On the terms of
  // `send`.
  void copy_and_announce(char* target, const char* source, size_t size);
  // Waits for the next message until `deadline_ns`, forever if it is 0, and not at all if it is in the past. If
  // `look_ns` is not 0, looks for so long before that, if `look.h` has nothing against it. kInterrupted: a signal
  // came.
  Got wait(int64_t deadline_ns, int64_t look_ns);
  // Looks for the next message for so long, on the same terms, but never longer: an event loop has others to serve.
  // kNothing: it did not come, or there was no look.
  Got look(int64_t look_ns);
  // Empties the bell and looks. Never blocks.
  Got check();
  // The message that was found, until the next `send`. To be copied before anything is read of it.
  std::string_view message() const { return {theirs_ + kSlotPage, size_}; }
  // The size that no packet has, if it is that for which the peer is kBroken; else 0.
  uint32_t false_size() const { return size_ > wire::kMaxPacketBytes ? size_ : 0; }
  // Goes on to the next message.
  void taken() {
    our_words().taken.store(++received_, std::memory_order_relaxed);
    rings_ = 0;
  }
  // False if the peer has not taken our last message, as far as it tells. For after its end.
  bool was_taken() const { return !is_open() || their_words().taken.load(std::memory_order_relaxed) == sent_; }

  // Ends the conversation: there are no more messages. From any thread.
  void end();
  // Gives up everything. While nobody is inside another method.
  void close();

 private:
  SlotWords& our_words() const { return *reinterpret_cast<SlotWords*>(ours_); }
  SlotWords& their_words() const { return *reinterpret_cast<SlotWords*>(const_cast<char*>(theirs_)); }
  Got peek();
  Got sleep(int64_t deadline_ns, int64_t look_ns);
  Got look_for(Looking& looking, int64_t begin_ns, int64_t look_ns, int64_t most_ns);
  bool is_announced() const;
  Got read_bell();

  char* ours_ = nullptr;
  const char* theirs_ = nullptr;
  // To read from; to write to, which is the peer's; to write to our own; the other end of the peer's.
  Descriptor bell_, ring_, own_ring_, kept_;
  bool is_maker_ = false;
  uint64_t sent_ = 0, received_ = 0;
  uint32_t size_ = 0, rings_ = 0;
  // The peer was looking when it got our last message.
  bool peer_looks_ = false;
  std::atomic<bool> ended_{false};
  // The forks before this process had it.
  uint64_t forks_ = 0;
  // Of all looks, and of those for messages that were announced before.
  Looking looking_, awaiting_;

  // Tests let both ends use memory at one address, where a sanitizer sees what they do.
  friend struct SlotsTest;
};

}  // namespace moonpool
