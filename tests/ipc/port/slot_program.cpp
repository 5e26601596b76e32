// Both ends of a work channel in memory, as threads of one process: for the sanitizers.
//
//   slot_program turns COUNT LOOK_NS   messages of all sizes there and back, which must arrive as they were sent
//   slot_program liar COUNT            against a peer that changes everything all the time; none may do harm
//   slot_program looks WAITS           for how many microseconds a thread looks in each of these waits: a message comes
//                                      quickly (q), late (l) or not meanwhile (v), and capital if the peer looks
//   slot_program rings DIGITS          each digit as often as an announcement rings while it is the peer's `asleep`
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "clock.h"
#include "slot.h"

namespace moonpool {

// Lets both ends use memory at one address: the thread sanitizer tells it by that.
struct SlotsTest {
  static void join(Slots& maker, Slots& taker) {
    mprotect(const_cast<char*>(maker.theirs_), kSlotBytes, PROT_READ | PROT_WRITE);
    munmap(taker.ours_, kSlotBytes);
    munmap(const_cast<char*>(taker.theirs_), kSlotBytes);
    taker.ours_ = const_cast<char*>(maker.theirs_);
    taker.theirs_ = maker.ours_;
  }
  static void part(Slots& taker) { taker.ours_ = nullptr, taker.theirs_ = nullptr; }
  static SlotWords& words(Slots& slots) { return slots.our_words(); }
  static uint64_t number(Slots& slots) { return slots.their_words().seq; }
  static int ring(Slots& slots) { return slots.ring_.get(); }
  static int bell(Slots& slots) { return slots.bell_.get(); }
};

namespace {

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  _exit(1);
}

void open(Slots& maker, Slots& taker) {
  Slots::Offer offer;
  if (!maker.make(offer)) fail("no slots");
  if (!taker.take(offer.makers.release(), offer.peers.release(), offer.bell.release(), offer.ring.release())) {
    fail("not taken");
  }
}

Slots::Got next(Slots& slots, int64_t look_ns, std::string& copy) {
  Slots::Got got = Slots::Got::kInterrupted;
  while (got == Slots::Got::kInterrupted) got = slots.wait(0, look_ns);
  if (got == Slots::Got::kMessage) {
    copy.assign(slots.message());
    slots.taken();
  }
  return got;
}

std::string packet_of(size_t turn) {
  const size_t sizes[] = {1, 63, 150, 4096, wire::kMaxPacketBytes};
  return std::string(sizes[turn % 5], static_cast<char>('a' + turn % 26));
}

void turns(size_t count, int64_t look_ns) {
  Slots maker, taker;
  open(maker, taker);
  SlotsTest::join(maker, taker);
  std::thread peer([&] {
    std::string copy;
    while (next(taker, look_ns, copy) == Slots::Got::kMessage && copy != "end") taker.send(copy);
  });
  std::string copy, tensor(kAnnouncedBytes + 5, 'x'), target(tensor.size(), ' ');
  for (size_t turn = 0; turn < count; ++turn) {
    // The first copy reaches beyond the part before which the message is announced.
    if (turn % 4 == 0) maker.copy_and_announce(target.data(), tensor.data(), turn ? 4096 : tensor.size());
    maker.send(packet_of(turn));
    // Event loops look so, between two sleeps.
    if (turn % 3 == 0) maker.look(look_ns);
    if (turn % 5 == 0) maker.check();
    if (next(maker, look_ns, copy) != Slots::Got::kMessage || copy != packet_of(turn)) fail("another message");
  }
  maker.send("end");
  std::thread closer([&] { maker.end(); });
  if (next(maker, 0, copy) != Slots::Got::kEnded) fail("no end");
  closer.join();
  peer.join();
  if (target != tensor) fail("another tensor");
  SlotsTest::part(taker);
}

// Parses a copy as a codec does: lengths in it lead from one to the next.
size_t parsed(const std::string& copy) {
  size_t at = 0, sum = 0;
  while (at < copy.size()) {
    const auto length = static_cast<unsigned char>(copy[at]);
    if (length > copy.size() - at - 1) break;
    for (size_t i = 0; i < length; ++i) sum += static_cast<unsigned char>(copy[at + 1 + i]);
    at += 1 + length;
  }
  return sum;
}

void liar(size_t count) {
  size_t messages = 0, broken = 0, sum = 0;
  for (size_t round = 0; round < count; ++round) {
    Slots maker, taker;
    open(maker, taker);
    std::atomic<bool> stops{false};
    std::thread peer([&] {
      SlotWords& words = SlotsTest::words(taker);
      volatile char* bytes = reinterpret_cast<volatile char*>(&words) + kSlotPage;
      for (unsigned turn = 0; !stops; ++turn) {
        words.asleep = turn % 3;
        words.size = turn % 7 == 0 && round % 4 == 0 ? 0xffffffffu : turn % wire::kMaxPacketBytes + 1;
        for (unsigned i = 0; i < 64; ++i) {
          bytes[(turn * 61 + i * 509) % wire::kMaxPacketBytes] = static_cast<char>(turn * 7 + i);
        }
        // Most of the time the right one: only then is the message read.
        words.seq = SlotsTest::number(taker) + (round % 8 == 1 && turn % 512 == 0);
        const char byte = 1;
        if (turn % 5 == 0 && ::write(SlotsTest::ring(taker), &byte, 1) < 0) continue;
      }
    });
    const int64_t end_ns = monotonic_ns() + 3'000'000;
    Slots::Got got = Slots::Got::kNothing;
    std::string copy;
    while (got != Slots::Got::kBroken && monotonic_ns() < end_ns) {
      maker.send("x");
      got = maker.wait(end_ns, 30'000);
      if (got != Slots::Got::kMessage) continue;
      copy.assign(maker.message());
      maker.taken();
      sum += parsed(copy);
      ++messages;
    }
    broken += got == Slots::Got::kBroken;
    maker.end();
    stops = true;
    peer.join();
  }
  printf("%zu messages, %zu broken, %zu\n", messages, broken, sum % 10);
  if (broken == 0) fail("no lie was found out");
}

void rings_for(const char* asleep) {
  Slots maker, taker;
  open(maker, taker);
  for (; *asleep; ++asleep) {
    SlotsTest::words(taker).asleep = static_cast<uint32_t>(*asleep - '0');
    char byte = 1, copy = 0;
    maker.copy_and_announce(&copy, &byte, 1);
    int rung = 0;
    ioctl(SlotsTest::bell(taker), FIONREAD, &rung);
    while (rung > 0 && ::read(SlotsTest::bell(taker), &byte, 1) == 1) printf("%c", *asleep), --rung;
  }
}

void looks_for(const char* waits) {
  constexpr int64_t kLookNs = 30'000;
  Looking looking;
  for (const char* wait = waits; *wait; ++wait) {
    const char how = static_cast<char>(*wait | 32);
    const int64_t long_ns = looking.begin(kLookNs, 0, 1, how != *wait, monotonic_ns());
    printf("%d ", static_cast<int>(long_ns / 1000));
    if (long_ns > 0) looking.end(kLookNs, how == 'q' ? 10'000 : long_ns, how != 'v');
    looking.waited(kLookNs, 60'000);
  }
}

}  // namespace
}  // namespace moonpool

int main(int, char** arguments) {
  const size_t count = strtoul(arguments[2], nullptr, 10);
  if (!strcmp(arguments[1], "turns")) moonpool::turns(count, strtol(arguments[3], nullptr, 10));
  else if (!strcmp(arguments[1], "rings")) moonpool::rings_for(arguments[2]);
  else if (!strcmp(arguments[1], "looks")) moonpool::looks_for(arguments[2]);
  else moonpool::liar(count);
}
