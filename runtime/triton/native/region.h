// Shared memory: sealed memfds, and which of their bytes are in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "channel.h"

namespace moonpool {

// A memfd, sealed against shrinking and growing and fully allocated, so that no access to it can fail; mapped for
// reading and writing. The other process may change the bytes at any time.
class Region {
 public:
  // The launcher made it. Throws Failure.
  Region(uint64_t id, uint64_t size, Descriptor file);
  ~Region();
  Region(const Region&) = delete;

  uint64_t id() const { return id_; }
  uint64_t size() const { return size_; }
  int fd() const { return file_.get(); }
  char* at(uint64_t offset) const { return memory_ + offset; }

 private:
  uint64_t id_;
  uint64_t size_;
  Descriptor file_;
  char* memory_;
};

// Where a block begins.
struct Spot {
  uint64_t region;
  uint64_t offset;
  bool operator<(const Spot& other) const {
    return region != other.region ? region < other.region : offset < other.offset;
  }
};

// The regions of which this process gives out blocks. Not thread-safe.
class Arena {
 public:
  void add(std::shared_ptr<Region> region);
  // A block, where there is room for one. The first that is large enough is cut, so that low addresses are used again
  // and again and stay in the processor's cache.
  bool take(uint64_t size, Spot* spot);
  void give(Spot spot);
  const std::shared_ptr<Region>& region(uint64_t id) const { return extents_.at(id).region; }
  // How many bytes a block in use has; 0 for what is none.
  uint64_t size_of(Spot spot) const;
  uint64_t size() const;
  bool has_grown() const { return extents_.size() > 1; }
  // Takes out the regions beyond the first in which nothing was in use since the last time that this was asked.
  std::vector<std::shared_ptr<Region>> retire_idle();

 private:
  struct Extents {
    std::shared_ptr<Region> region;
    std::map<uint64_t, uint64_t> free;  // sizes by offset
    std::map<uint64_t, uint64_t> used;
    bool is_idle = false;
  };
  std::map<uint64_t, Extents> extents_;
  uint64_t first_ = 0;
};

}  // namespace moonpool
