// Memory that a stub and this process share: the request side, which this process writes, and the answers.
//
// Theory of operation. Each side has its own lock, since the instance's thread, the thread that listens to the stub and
// callbacks of calls use both at once. All bookkeeping is in this process's own memory. A place that the stub names is
// looked up there and never trusted, and a wrong one is a Violation. The stub may change the bytes themselves at any
// time, so whatever is checked is copied first.
//
// A borrowed block ends when its batch is over, the model does not keep it, and nobody else holds it; only then are its
// bytes used again. A region is never resized. If it is too small, another region is added. A region stays mapped while
// a View refers to it, even after it was given up.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "channel.h"
#include "region.h"
#include "wire.h"

namespace moonpool {

// The stub has broken the protocol. Its messages are not read any more.
struct Violation : std::runtime_error {
  using runtime_error::runtime_error;
};

// Returns true if a packet was received. Throws Violation for a packet that is too long.
inline bool is_there(Channel::Received received) {
  if (received == Channel::Received::kTooLong) {
    throw Violation("a packet of more than " + std::to_string(wire::kMaxPacketBytes) + " bytes");
  }
  return received == Channel::Received::kDone;
}

// Makes regions for one stub. Any thread may call any method.
class RegionSource {
 public:
  // Make a region, which the stub does not know yet. `present` bytes are in use in regions of that writer. Throws
  // Failure.
  virtual std::shared_ptr<Region> create(wire::Side writer, uint64_t present, uint64_t needed) = 0;
  // Give an empty region back. A contained stub may have kept it, so the launcher gives it only to this stub again.
  virtual void give_back(wire::Side writer, uint64_t region) = 0;
  // Announce a region to the stub, or tell it to forget one. Both throw Violation.
  virtual void announce(const Region& region, wire::Side writer) = 0;
  virtual void retire(uint64_t region) = 0;

 protected:
  ~RegionSource() = default;
};

// Bytes that the stub named. They stay mapped while this object lives. The stub may change them at any time.
struct View {
  std::shared_ptr<Region> region;
  const char* bytes = nullptr;
  uint64_t size = 0;
};

// Blocks that the stub may look at. A block is borrowed for a batch. If the stub says that the model keeps it, it is
// borrowed until the stub gives it back. Any thread may call any method.
class BorrowedBlocks {
 public:
  BorrowedBlocks(std::shared_ptr<Region> first, RegionSource& source);

  // Lend a block, into which this process writes, for this batch; with `keep`, until the stub gives it back. Throws
  // Failure.
  Spot lend(uint64_t size, char** memory, bool keep = false);
  uint64_t first_region() const { return first_region_; }
  // Returns the bytes of a borrowed block. Throws Violation if the stub has not borrowed all of them.
  View look(const wire::Block& block) { return look(block, 0); }
  // Returns the bytes as `look` does, for another reader. They are not reused before `release`, whatever the stub
  // sends.
  View hold(const wire::Block& block) { return look(block, 1); }
  void release(Spot spot);
  // Note the blocks of the batch that the model keeps. Throws Violation.
  void keep(const List<wire::Place>& held);
  // Throws Violation if the stub does not keep one of these.
  void check_kept(const List<wire::Place>& places);
  // End the batch, and give back its borrowed blocks but for those that the model keeps.
  void end_batch();
  // Take back a block that the model kept. Throws Violation.
  void take_back(const Spot& place);
  // Give up regions that were not used since the last time. The first one that was added is kept for kKeepFirstMs.
  void tidy();
  bool has_grown();
  // Returns the number of borrowed blocks.
  size_t count();

 private:
  struct BorrowedBlock {
    uint64_t size;
    bool is_kept;
    bool is_over;
    unsigned holds;
  };
  // A region and the blocks that are borrowed from it, by their offsets.
  struct Part {
    std::shared_ptr<Region> region;
    std::map<uint64_t, BorrowedBlock> borrowed_blocks;
    // When `tidy` first found it without a block since then.
    std::optional<std::chrono::steady_clock::time_point> idle_since = std::nullopt;
  };
  // Gives up an idle region. Returns the next one.
  std::map<uint64_t, Part>::iterator give_up(std::map<uint64_t, Part>::iterator each);
  View look(const wire::Block& block, unsigned more_holds);
  std::shared_ptr<Region> create(uint64_t present, uint64_t size);
  static bool place(Part& part, const BorrowedBlock& borrowed, uint64_t* offset);
  BorrowedBlock* find(const Spot& spot);
  BorrowedBlock& kept(const Spot& spot);
  void end(const Spot& spot, BorrowedBlock& borrowed);

  RegionSource& source_;
  const uint64_t first_region_;
  std::mutex mutex_;
  std::map<uint64_t, Part> parts_;
  std::vector<Spot> batch_;
};

// The regions that the stub writes its answers into. Any thread may call any method.
class Answers {
 public:
  Answers(std::shared_ptr<Region> first, RegionSource& source);

  bool has(uint64_t region);
  // Returns the bytes of a block of an answer. Throws Violation if it is outside of the stub's regions.
  View look(const wire::Block& block);
  // Release a block. The stub learns of it with the next batch, or by a message of its own.
  void release(Spot spot);
  // Take out released blocks for a message, at most `most`.
  void take_released(std::vector<wire::Place>* places, size_t most);
  // True if the released blocks are enough for a message of their own.
  bool has_many_released();
  // Add a region of at least `needed` bytes. Throws Failure if there is no memory.
  void grow(uint64_t needed);
  // Drop a region that the stub does not use any more. Throws Violation.
  void retire(uint64_t region);
  bool has_grown();

 private:
  RegionSource& source_;
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Region>> regions_;
  std::vector<wire::Place> released_;
};

// If a message is too large for a packet, puts it into a borrowed block and makes it INDIRECT. With `keep`, the stub
// releases the block. Throws Failure, Violation.
inline void pack(Writer& message, BorrowedBlocks& borrowed_blocks, bool keep = false) {
  const uint64_t size = message.bytes().size();
  if (size <= wire::kMaxPacketBytes) return;
  char* memory;
  const Spot spot = borrowed_blocks.lend(size, &memory, keep);
  std::memcpy(memory, message.bytes().data(), size);
  wire::encode<wire::Kind::INDIRECT>(message, spot.region, spot.offset, size);
}

// Copies the beginning of a message in the stub's memory, so that the stub cannot change it any more. Throws Violation.
inline std::string beginning_of(const wire::Indirect& where, Answers& answers) {
  const View view = answers.look({where.region, where.offset, where.size});
  return std::string(view.bytes, std::min<uint64_t>(view.size, wire::kMaxPacketBytes));
}

// Decodes the stub's message. Throws Violation for a message that is not in the tables.
template <class Table>
auto decoded(const Table& table, std::string_view packet) {
  auto message = decode(table, wire::Side::STUB, packet);
  if (!message) throw Violation(message.wrong);
  return message;
}

// Copies the message in the stub's memory that INDIRECT points to into `stored`, and decodes it. Throws Violation if it
// has more than `most` bytes, and as `decoded` does.
template <class Table>
auto fetched(const Table& table, const wire::Indirect& where, Answers& answers, std::string* stored, uint64_t most) {
  const View view = answers.look({where.region, where.offset, where.size});
  // Check before the copy: a region may be as large as the machine's memory.
  if (view.size > most) {
    throw Violation("a message of " + std::to_string(view.size) + " bytes; " + std::to_string(most) + " is the most");
  }
  stored->assign(view.bytes, view.size);
  answers.release({where.region, where.offset});
  auto message = decoded(table, *stored);
  if (message.kind() == wire::Kind::INDIRECT) throw Violation("INDIRECT that refers to another one");
  return message;
}

// Decodes the stub's message. If it points to one in memory, copies that into `stored` and decodes it. Throws
// Violation.
template <class Table>
auto opened(const Table& table, std::string_view packet, Answers& answers, std::string* stored) {
  stored->clear();
  auto message = decoded(table, packet);
  if (message.kind() != wire::Kind::INDIRECT) return message;
  return fetched(table, wire::Indirect(message.fields), answers, stored, wire::kMaxStoredBytes);
}

}  // namespace moonpool
