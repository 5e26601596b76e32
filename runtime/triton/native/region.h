// Shared memory: sealed memfds.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "api.h"
#include "channel.h"
#include "wire.h"

namespace moonpool {

// A memfd, sealed against shrinking and growing and fully allocated, so that no access to it can fail; mapped for
// reading and writing. The other process may change the bytes at any time.
class Region {
 public:
  // Maps a memfd that the launcher made. Throws Failure.
  Region(uint64_t id, uint64_t size, Descriptor file) : id_(id), size_(size), file_(std::move(file)) {
    struct stat status;
    const int seals = fcntl(file_.get(), F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals || fstat(file_.get(), &status) < 0 ||
        static_cast<uint64_t>(status.st_size) != size) {
      throw Failure(triton::kInternal, "region " + std::to_string(id) + " is not what was announced");
    }
    const int flags = MAP_SHARED | (size < kLarge ? 0 : MAP_POPULATE);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file_.get(), 0);
    if (memory == MAP_FAILED) {
      throw Failure(triton::kUnavailable,
                    "cannot map " + std::to_string(size) + " bytes of shared memory: " + std::strerror(errno));
    }
    memory_ = static_cast<char*>(memory);
  }
  ~Region() { munmap(memory_, size_); }
  Region(const Region&) = delete;

  uint64_t id() const { return id_; }
  uint64_t size() const { return size_; }
  int fd() const { return file_.get(); }
  char* at(uint64_t offset) const { return memory_ + offset; }

 private:
  // A large region is made for a tensor that is about to be written. Mapping all its pages at once takes a fifth of the
  // time of faulting them in one by one.
  static constexpr uint64_t kLarge = 2 << 20;
  static constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;

  uint64_t id_;
  uint64_t size_;
  Descriptor file_;
  char* memory_;
};

// The place where a block begins.
using Spot = wire::Place;

}  // namespace moonpool
