// What a stub and this process see together: the request side, which is written here, and the answers, written there.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <vector>

#include "region.h"
#include "wire.h"

namespace moonpool {

// The stub has said what it may not: it is not listened to any more.
struct Violation : std::runtime_error {
  using runtime_error::runtime_error;
};

// The elements of a tensor of a shape that the stub named; none where no memory could hold them.
std::optional<uint64_t> elements_of(const List<uint64_t>& shape);

// Where regions for one stub come from. Any thread may call any method.
class RegionSource {
 public:
  // Another region, of which the stub does not know yet. `present` bytes are in use in regions with that writer. Throws
  // Failure.
  virtual std::shared_ptr<Region> create(wire::Side writer, uint64_t present, uint64_t needed) = 0;
  // Nothing lies in a region any more. A contained stub may have kept it, so the launcher gives it to this stub again.
  virtual void give_back(wire::Side writer, uint64_t region) = 0;
  // Tell the stub of a region, or to forget one. Both throw Violation.
  virtual void announce(const Region& region, wire::Side writer) = 0;
  virtual void retire(uint64_t region) = 0;

 protected:
  ~RegionSource() = default;
};

// Bytes that the stub named, and that stay mapped for as long as this lives. The stub may change them at any time.
struct View {
  std::shared_ptr<Region> region;
  const char* bytes = nullptr;
  uint64_t size = 0;
};

// What the stub may look at. A loan lasts for a batch, unless the stub says that the model keeps it, or until the stub
// gives it back. Any thread may call any method.
class Loans {
 public:
  Loans(std::shared_ptr<Region> first, RegionSource& source);

  // A block to write into, lent for this batch; with `keep`, until the stub gives it back. Throws Failure.
  Spot lend(uint64_t size, char** memory, bool keep = false);
  uint64_t first_region() const { return first_region_; }
  // What is lent at this place. Throws Violation where so much is not.
  View look(const wire::Block& block) { return look(block, 0); }
  // As `look`, for somebody else: until `let_go` the bytes are not used again, whatever the stub says.
  View hold(const wire::Block& block) { return look(block, 1); }
  void let_go(Spot spot);
  // The batch is over, and with it its loans, but for those that the model keeps. Throws Violation.
  void end_batch(const List<wire::Place>& held);
  // The stub gives back what it kept. Throws Violation.
  void take_back(const Spot& place);
  // Give up regions that were not used since the last time.
  void tidy();
  bool has_grown();

 private:
  struct Loan {
    uint64_t size;
    bool is_kept;
    bool is_over;
    unsigned holds;
  };
  // A region, and what is lent of it: by where that begins.
  struct Part {
    std::shared_ptr<Region> region;
    std::map<uint64_t, Loan> loans;
    bool is_idle = false;
  };
  View look(const wire::Block& block, unsigned more_holds);
  static bool place(Part& part, const Loan& loan, uint64_t* offset);
  Loan* find(const Spot& spot);
  void end(const Spot& spot, Loan& loan);

  RegionSource& source_;
  const uint64_t first_region_;
  std::mutex mutex_;
  std::map<uint64_t, Part> parts_;
  std::vector<Spot> batch_;
};

// Where the stub puts its answers. Any thread may call any method.
class Answers {
 public:
  Answers(std::shared_ptr<Region> first, RegionSource& source);

  bool has(uint64_t region);
  // A block of an answer. Throws Violation for what is not the stub's to answer from.
  View look(const wire::Block& block);
  // Nobody needs this block any more; the stub is told with the next batch, or by a message of its own.
  void release(Spot spot);
  // The blocks to tell of, at most so many.
  void take_released(std::vector<wire::Place>* places, size_t most);
  // Whether there are so many that they are worth a message of their own.
  bool has_many_released();
  // Another region of at least so many bytes. Throws Failure where there is no memory.
  void grow(uint64_t needed);
  // The stub does not use a region any more. Throws Violation.
  void retire(uint64_t region);
  bool has_grown();

 private:
  RegionSource& source_;
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Region>> regions_;
  std::vector<wire::Place> released_;
};

// A tensor, by its index or its name: where it lies in which block.
template <class Which>
void write_tensor(Writer& writer, Which which, int datatype, const int64_t* shape, uint64_t dims, uint64_t block,
                  uint64_t offset, uint64_t size) {
  writer.array(6);
  write_all(writer, which, datatype);
  writer.array(dims);
  for (uint64_t i = 0; i < dims; ++i) writer.integer(shape[i]);
  write_all(writer, block, offset, size);
}

// What is too large for a packet is put into the stub's memory, and INDIRECT in its place; with `keep`, until the stub gives
// that back. Throws Failure, Violation.
inline void pack(Writer& message, Loans& loans, bool keep = false) {
  const uint64_t size = message.bytes().size();
  if (size <= wire::kMaxPacketBytes) return;
  char* memory;
  const Spot spot = loans.lend(size, &memory, keep);
  std::memcpy(memory, message.bytes().data(), size);
  wire::encode<wire::Kind::INDIRECT>(message, spot.region, spot.offset, size);
}

// A copy of the beginning of a message in the stub's memory, which the stub cannot change any more. Throws Violation.
inline std::string beginning_of(const wire::Indirect& where, Answers& answers) {
  const View view = answers.look({where.region, where.offset, where.size});
  return std::string(view.bytes, std::min<uint64_t>(view.size, wire::kMaxPacketBytes));
}

// The stub's message. Throws Violation for anything that the tables do not have.
template <class Table>
auto decoded(const Table& table, std::string_view packet) {
  auto message = decode(table, wire::Side::STUB, packet);
  if (!message) throw Violation(message.wrong);
  return message;
}

// The message in the stub's memory that INDIRECT points to, which is copied to `stored`. Throws Violation for one of more
// than `most` bytes, and as `decoded`.
template <class Table>
auto fetched(const Table& table, const wire::Indirect& where, Answers& answers, std::string* stored, uint64_t most) {
  const View view = answers.look({where.region, where.offset, where.size});
  // Before it is copied: a region may be as large as the machine's memory.
  if (view.size > most) {
    throw Violation("a message of " + std::to_string(view.size) + " bytes; " + std::to_string(most) + " is the most");
  }
  stored->assign(view.bytes, view.size);
  answers.release({where.region, where.offset});
  auto message = decoded(table, *stored);
  if (message.kind() == wire::Kind::INDIRECT) throw Violation("INDIRECT that stands for another one");
  return message;
}

// The stub's message, or the one in its memory that it points to, which is copied to `stored`. Throws Violation.
template <class Table>
auto opened(const Table& table, std::string_view packet, Answers& answers, std::string* stored) {
  stored->clear();
  auto message = decoded(table, packet);
  if (message.kind() != wire::Kind::INDIRECT) return message;
  return fetched(table, wire::Indirect(message.fields), answers, stored, wire::kMaxStoredBytes);
}

}  // namespace moonpool
