#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "api.h"

namespace moonpool {
namespace {

// A large region is made for a tensor that is about to be written: to have all its pages mapped at once takes a fifth of
// the time that it takes to find them missing one by one.
constexpr uint64_t kLarge = 2 << 20;
constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

Region::Region(uint64_t id, uint64_t size, Descriptor file)
    : id_(id), size_(size), file_(std::move(file)) {
  struct stat status;
  const int seals = fcntl(file_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(file_.get(), &status) < 0 ||
      static_cast<uint64_t>(status.st_size) != size) {
    throw Failure(triton::kInternal, "region " + std::to_string(id) + " is not what was announced");
  }
  const int flags = MAP_SHARED | (size < kLarge ? 0 : MAP_POPULATE);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file_.get(), 0);
  if (memory == MAP_FAILED) {
    throw Failure(triton::kUnavailable, "cannot map " + std::to_string(size) +
                                            " bytes of shared memory: " + std::strerror(errno));
  }
  memory_ = static_cast<char*>(memory);
}

Region::~Region() { munmap(memory_, size_); }

}  // namespace moonpool
