#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "clock.h"
#include "copy.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace moonpool {

namespace {

constexpr uint32_t kMostRings = 64;
constexpr int64_t kSliceNs = 1'000'000'000;
constexpr int kBellBytes = 4096;
// Looks between two looks at the clock.
constexpr int kLooksPerTime = 16;
// An announced message comes within so long, unless its sender has to wait for a core.
constexpr int64_t kAnnouncedNs = 200'000;

// The forks between this process and the first one that had this code.
uint64_t forks = 0;
void count_fork() { ++forks; }
const int counts_forks = pthread_atfork(nullptr, nullptr, count_fork);

// Makes a memfd of a slot, with pages: without memory left for them, a write would end the process.
Descriptor new_memory() {
  Descriptor memory(memfd_create("moonpool-slot", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0) return memory;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(memory.get(), 0, kSlotBytes);
  if (error == 0) return memory;
  errno = error;
  return Descriptor();
}

char* mapped(const Descriptor& memory, int protection) {
  void* at = mmap(nullptr, kSlotBytes, protection, MAP_SHARED, memory.get(), 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

// Returns true if nobody can change the size of the memory any more: touching it could end this process otherwise.
bool is_whole(const Descriptor& memory) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  struct stat about;
  if (fstat(memory.get(), &about) < 0 || about.st_size != static_cast<off_t>(kSlotBytes)) return false;
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  return seals >= 0 && (seals & kSeals) == kSeals;
}

bool new_bell(Descriptor& to_read, Descriptor& to_write) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) < 0) return false;
  to_read = Descriptor(ends[0]);
  to_write = Descriptor(ends[1]);
  // Pipes as long as usual would soon use up what a user may have in pipes. If this is refused, that is used up
  // already.
  fcntl(ends[0], F_SETPIPE_SZ, kBellBytes);
  return fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0;
}

// Opens an end of a pipe to write to once more, as a file description of its own, whose flags nobody else can change.
Descriptor opened_again(const Descriptor& end) {
  char path[32];
  snprintf(path, sizeof path, "/proc/self/fd/%d", end.get());
  return Descriptor(open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC));
}

// Returns false if there is no bell any more. A full one is rung.
bool ring(const Descriptor& bell) {
  const char byte = 0;
  while (::write(bell.get(), &byte, 1) < 0) {
    if (errno != EINTR) return errno == EAGAIN;
  }
  return true;
}

}  // namespace

bool Slots::make(Offer& offer) {
  offer = Offer();
  is_maker_ = true;
  forks_ = forks;
  offer.makers = new_memory();
  offer.peers = new_memory();
  if (offer.makers.get() < 0 || offer.peers.get() < 0) return false;
  ours_ = mapped(offer.makers, PROT_READ | PROT_WRITE);
  theirs_ = mapped(offer.peers, PROT_READ);
  if (ours_ == nullptr || theirs_ == nullptr) return false;
  // After the map: from here on nobody makes another one to write to.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(offer.makers.get(), F_ADD_SEALS, kSeals | F_SEAL_FUTURE_WRITE) < 0) return false;
  if (fcntl(offer.peers.get(), F_ADD_SEALS, kSeals) < 0) return false;
  madvise(ours_, kSlotBytes, MADV_DONTFORK);
  madvise(const_cast<char*>(theirs_), kSlotBytes, MADV_DONTFORK);
  if (!new_bell(bell_, offer.ring) || !new_bell(offer.bell, ring_)) return false;
  if (fcntl(bell_.get(), F_SETFL, O_NONBLOCK) < 0) return false;
  own_ring_ = opened_again(offer.ring);
  kept_ = Descriptor(fcntl(offer.bell.get(), F_DUPFD_CLOEXEC, 0));
  if (own_ring_.get() < 0 || kept_.get() < 0) return false;
  our_words().asleep.store(kAsleep, std::memory_order_relaxed);
  return true;
}

bool Slots::take(int makers, int peers, int bell, int ring) {
  is_maker_ = false;
  forks_ = forks;
  const Descriptor to_read(makers), to_write(peers);
  bell_ = Descriptor(bell);
  ring_ = Descriptor(ring);
  if (!is_whole(to_read) || !is_whole(to_write)) {
    errno = EINVAL;
    return false;
  }
  theirs_ = mapped(to_read, PROT_READ);
  ours_ = mapped(to_write, PROT_READ | PROT_WRITE);
  if (ours_ == nullptr || theirs_ == nullptr) return false;
  our_words().asleep.store(kAsleep, std::memory_order_relaxed);
  return true;
}

bool Slots::is_open() const { return theirs_ != nullptr && ours_ != nullptr && (forks_ == forks || !is_maker_); }

bool Slots::send(std::string_view packet) {
  SlotWords& words = our_words();
  // Before the number: a peer that answers it must see this.
  words.asleep.store(kAsleep, std::memory_order_relaxed);
  std::memcpy(ours_ + kSlotPage, packet.data(), packet.size());
  words.size.store(static_cast<uint32_t>(packet.size()), std::memory_order_relaxed);
  words.core.store(static_cast<uint32_t>(current_core()), std::memory_order_relaxed);
  words.seq.store(++sent_, std::memory_order_seq_cst);
  peer_looks_ = their_words().asleep.load(std::memory_order_seq_cst) == 0;
  return peer_looks_ || ring(ring_);
}

void Slots::copy_and_announce(char* target, const char* source, size_t size) {
  const size_t first = size - std::min(size, kAnnouncedBytes);
  copy(target, source, first);
  our_words().announced.store(sent_ + 1, std::memory_order_seq_cst);
  // A bell that cannot be rung is for `send` to find.
  if (their_words().asleep.load(std::memory_order_seq_cst) == kAsleepWaiting) ring(ring_);
  copy(target + first, source + first, size - first);
}

bool Slots::is_announced() const { return their_words().announced.load(std::memory_order_seq_cst) == received_ + 1; }

// Returns kMessage if the next message is there.
Slots::Got Slots::peek() {
  // First: a message may have become whole right before the end.
  const bool ended = ended_.load(std::memory_order_acquire);
  const SlotWords& words = their_words();
  const uint64_t seq = words.seq.load(std::memory_order_seq_cst);
  if (seq == received_ + 1) {
    size_ = words.size.load(std::memory_order_relaxed);
    return size_ == 0 || size_ > wire::kMaxPacketBytes ? Got::kBroken : Got::kMessage;
  }
  if (ended) return Got::kEnded;
  return seq != received_ || rings_ > kMostRings ? Got::kBroken : Got::kNothing;
}

Slots::Got Slots::wait(int64_t deadline_ns, int64_t look_ns) {
  const int64_t begin_ns = look_ns > 0 ? monotonic_ns() : 0;
  Got got = look_ns > 0 ? look_for(looking_, begin_ns, look_ns, kSliceNs) : Got::kNothing;
  if (got == Got::kNothing) got = sleep(deadline_ns, look_ns);
  if (look_ns > 0 && got == Got::kMessage) looking_.waited(look_ns, monotonic_ns() - begin_ns);
  return got;
}

Slots::Got Slots::look(int64_t look_ns) {
  const Got got = peek();
  if (got == Got::kNothing) return look_for(looking_, monotonic_ns(), look_ns, look_ns);
  // It was sent before anybody looked, with a ring, for which an event loop would be woken once more.
  if (got == Got::kMessage && is_maker_) read_bell();
  return got;
}

Slots::Got Slots::look_for(Looking& looking, int64_t begin_ns, int64_t look_ns, int64_t most_ns) {
  const uint64_t core = their_words().core.load(std::memory_order_relaxed);
  const int64_t long_ns = looking.begin(look_ns, current_core(), core, peer_looks_, begin_ns);
  if (long_ns == 0) return Got::kNothing;
  std::atomic<uint32_t>& asleep = our_words().asleep;
  asleep.store(0, std::memory_order_relaxed);
  Got got;
  int64_t taken_ns = 0, end_ns = std::min(long_ns, most_ns);
  do {
    for (int i = 0; (got = peek()) == Got::kNothing && i < kLooksPerTime; ++i) relax();
    taken_ns = monotonic_ns() - begin_ns;
    // Once: it goes on until the message that was announced is here.
    if (taken_ns >= end_ns && end_ns < most_ns && is_announced()) {
      end_ns = most_ns = std::min(most_ns, end_ns + kAnnouncedNs);
    }
  } while (got == Got::kNothing && taken_ns < end_ns);
  asleep.store(kAsleep, std::memory_order_seq_cst);
  if (got == Got::kNothing) got = peek();
  looking.end(look_ns, taken_ns, got == Got::kMessage);
  return got;
}

Slots::Got Slots::sleep(int64_t deadline_ns, int64_t look_ns) {
  bool awaits = look_ns > 0 && current_core() != their_words().core.load(std::memory_order_relaxed);
  if (awaits) our_words().asleep.store(kAsleepWaiting, std::memory_order_seq_cst);
  for (;;) {
    Got got = peek();
    if (got == Got::kNothing && awaits && is_announced()) {
      awaits = false;
      got = look_for(awaiting_, monotonic_ns(), kAnnouncedNs, kAnnouncedNs);
    }
    if (got != Got::kNothing) return got;
    if (is_maker_ || deadline_ns != 0) {
      int64_t left_ns = kSliceNs;
      if (deadline_ns != 0) {
        left_ns = deadline_ns - monotonic_ns();
        if (left_ns <= 0) return Got::kNothing;
        if (is_maker_) left_ns = std::min(left_ns, kSliceNs);
      }
      const timespec left{left_ns / kSliceNs, left_ns % kSliceNs};
      pollfd bell{bell_.get(), POLLIN, 0};
      const int found = ppoll(&bell, 1, &left, nullptr);
      // Also at the end of a slice, after which signals are looked for.
      if (found == 0 || (found < 0 && errno == EINTR)) return Got::kInterrupted;
      if (found < 0) return Got::kEnded;
    }
    got = read_bell();
    if (got != Got::kNothing) return got;
  }
}

// Takes what is in the bell. Blocks in a stub while that is nothing.
Slots::Got Slots::read_bell() {
  char bytes[64];
  const ssize_t size = ::read(bell_.get(), bytes, sizeof bytes);
  if (size > 0) {
    ++rings_;
    // Whoever watches the bell next must find it rung.
    if (ended_.load(std::memory_order_acquire)) ring(own_ring_);
    return Got::kNothing;
  }
  if (size < 0 && errno == EAGAIN) return Got::kNothing;
  if (size < 0 && errno == EINTR) return Got::kInterrupted;
  // No writer is left: a stub's runtime is gone.
  ended_.store(true, std::memory_order_release);
  return peek();
}

Slots::Got Slots::check() {
  pollfd bell{bell_.get(), POLLIN, 0};
  if (is_maker_ || poll(&bell, 1, 0) > 0) read_bell();
  return peek();
}

void Slots::end() {
  ended_.store(true, std::memory_order_release);
  if (own_ring_.get() >= 0) ring(own_ring_);
}

void Slots::close() {
  // In a fork of the maker there is nothing at these addresses, or something else.
  const bool is_mapped = forks_ == forks || !is_maker_;
  if (is_mapped && ours_ != nullptr) munmap(ours_, kSlotBytes);
  if (is_mapped && theirs_ != nullptr) munmap(const_cast<char*>(theirs_), kSlotBytes);
  ours_ = nullptr;
  theirs_ = nullptr;
  bell_ = Descriptor();
  ring_ = Descriptor();
  own_ring_ = Descriptor();
  kept_ = Descriptor();
}

}  // namespace moonpool
