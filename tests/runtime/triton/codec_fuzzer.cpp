// Changes the packets on its standard input at random, and those that came of it and reached new code.
//
// codec_fuzzer SECONDS SEED FILE. Each that reached new code it writes to its standard output: the channel and the
// sender as a text, the packet, and what the codec says of it. One that is not borne is in the file when this ends.
#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <vector>

#include "codec_telling.h"

#define UNCHECKED __attribute__((no_sanitize_coverage, no_sanitize("address", "undefined")))

namespace {

constexpr size_t kLongest = 1024, kAtOnce = 256;
constexpr unsigned kLimitSeconds = 20;

// How often each way from one place in the code to the next was gone.
constexpr size_t kWays = 1 << 15;
alignas(uint64_t) uint8_t ways[kWays];
uintptr_t last_place = 0;

const char* crash_file = nullptr;
Packet tried;

void keep_what_was_tried() {
  const int file = open(crash_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  const uint8_t head[] = {tried.channel, tried.sender};
  const bool is_kept = write(file, head, sizeof head) == sizeof head &&
                       write(file, tried.bytes.data(), tried.bytes.size()) >= 0;
  constexpr char kSaid[] = "The packet could not be kept.\n";
  if (!is_kept && write(STDERR_FILENO, kSaid, sizeof kSaid - 1) < 0) _exit(2);
  close(file);
}

void give_up(int) {
  keep_what_was_tried();
  _exit(1);
}

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  size_t below(size_t end) { return static_cast<size_t>(random_() % end); }
  template <class T>
  const T& of(const std::vector<T>& things) {
    return things[below(things.size())];
  }

 private:
  std::mt19937_64 random_;
};

// A value of msgpack, or the head of one.
std::string some_value(Dice& dice) {
  static const std::vector<uint64_t> edges = {0, 1, 31, 32, 127, 128, 255, 256, 65535, 65536, UINT32_MAX,
                                              uint64_t{1} << 32, uint64_t{1} << 63, UINT64_MAX};
  Writer writer;
  const uint64_t number = dice.of(edges) - dice.below(2);
  switch (dice.below(8)) {
    case 0:
      writer.nil();
      break;
    case 1:
      writer.flag(number & 1);
      break;
    case 2:
      writer.integer(static_cast<int64_t>(number));
      break;
    case 3:
      writer.array(number);
      break;
    case 4:
      writer.map(number);
      break;
    case 5:
      writer.text(std::string(dice.below(40), 'a'));
      break;
    case 6:
      writer.raw(std::string(dice.below(40), '\xff'));
      break;
    default:
      writer.uint(number);
  }
  return std::string(writer.bytes());
}

void change(Packet& packet, const std::vector<Packet>& known, Dice& dice) {
  std::string& bytes = packet.bytes;
  const size_t at = dice.below(bytes.size() + 1), size = dice.below(8);
  switch (dice.below(8)) {
    case 0:
      if (at < bytes.size()) bytes[at] = static_cast<char>(dice.below(256));
      break;
    case 1:
      if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ 1 << dice.below(8));
      break;
    case 2:
      bytes.erase(at, size);
      break;
    case 3:
      bytes.replace(at, dice.below(3), some_value(dice));
      break;
    case 4:
      bytes.insert(at, std::string(1 + size, static_cast<char>(dice.below(256))));
      break;
    case 5:
      bytes.insert(at, bytes.substr(dice.below(bytes.size() + 1), 1 + dice.below(32)));
      break;
    case 6: {
      const std::string& other = dice.of(known).bytes;
      bytes.replace(at, dice.below(32), other.substr(dice.below(other.size() + 1), dice.below(32)));
      break;
    }
    default:
      packet.sender = static_cast<uint8_t>(packet.channel < 4 ? 1 + size % 2 : dice.below(256));
  }
  if (bytes.size() > kLongest) bytes.resize(kLongest);
}

// Whether the packet went a way that none went before, or one much more often.
class Seen {
 public:
  bool add(const Packet& packet, Told* told) {
    std::memset(ways, 0, kWays);
    last_place = 0;
    tried = packet;
    *told = packet.told();
    return look();
  }

 private:
  // It is looked at after each packet: what checks itself there takes longer than the packet.
  UNCHECKED bool look() {
    bool is_new = false;
    for (size_t i = 0; i < kWays; ++i) {
      if (i % sizeof(uint64_t) == 0 && *reinterpret_cast<const uint64_t*>(ways + i) == 0) {
        i += sizeof(uint64_t) - 1;
      } else if (ways[i] != 0) {
        const auto often = static_cast<uint8_t>(1 << std::min(7, 31 - __builtin_clz(ways[i])));
        is_new = is_new || (seen_[i] & often) == 0;
        seen_[i] = static_cast<uint8_t>(seen_[i] | often);
      }
    }
    return is_new;
  }

  uint8_t seen_[kWays] = {};
};

}  // namespace

extern "C" {
const char* __asan_default_options() { return "handle_abort=1"; }

// Called by the compiler's own doing at every branch.
UNCHECKED void __sanitizer_cov_trace_pc() {
  const uintptr_t place = (reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                           reinterpret_cast<uintptr_t>(&__sanitizer_cov_trace_pc)) *
                          0x9e3779b1u;
  uint8_t& count = ways[((place ^ last_place) >> 8) % kWays];
  if (count < 255) ++count;
  last_place = place >> 1;
}
}

int main(int, char** arguments) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[1]));
  Dice dice(std::strtoull(arguments[2], nullptr, 10));
  crash_file = arguments[3];
  __sanitizer_set_death_callback(keep_what_was_tried);
  signal(SIGALRM, give_up);

  std::vector<Packet> known;
  Seen seen;
  Told told;
  for (Packet packet; packet.read(stdin);) {
    seen.add(packet, &told);
    known.push_back(packet);
  }
  size_t runs = 0;
  while (std::chrono::steady_clock::now() < end) {
    alarm(kLimitSeconds);
    for (size_t i = 0; i < kAtOnce; ++i, ++runs) {
      Packet packet = dice.of(known);
      for (size_t changes = 1 + dice.below(4); changes > 0; --changes) change(packet, known, dice);
      if (!seen.add(packet, &told)) continue;
      const char head[] = {static_cast<char>(packet.channel), static_cast<char>(packet.sender)};
      put(std::string_view(head, sizeof head));
      put(packet.bytes);
      put(told.refused);
      put(told.again);
      known.push_back(std::move(packet));
    }
  }
  std::fprintf(stderr, "%zu packets were tried\n", runs);
  return 0;
}
