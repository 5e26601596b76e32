// Shared memory: sealed memfds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "channel.h"
#include "wire.h"

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
using Spot = wire::Place;

}  // namespace moonpool
