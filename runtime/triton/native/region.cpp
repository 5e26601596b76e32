#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "api.h"

namespace moonpool {
namespace {

constexpr uint64_t kAlignment = 64;
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

void Arena::add(std::shared_ptr<Region> region) {
  if (extents_.empty()) first_ = region->id();
  const uint64_t id = region->id(), size = region->size();
  Extents& extents = extents_[id];
  extents.region = std::move(region);
  extents.free = {{0, size}};
}

bool Arena::take(uint64_t size, Spot* spot) {
  size = std::max((size + kAlignment - 1) & -kAlignment, kAlignment);
  for (auto& [id, extents] : extents_) {
    for (auto free = extents.free.begin(); free != extents.free.end(); ++free) {
      if (free->second < size) continue;
      const uint64_t offset = free->first, rest = free->second - size;
      // The node is used again: what is most often taken is the beginning of all that is free.
      auto node = extents.free.extract(free);
      if (rest) {
        node.key() = offset + size;
        node.mapped() = rest;
        extents.free.insert(std::move(node));
      }
      extents.used.emplace(offset, size);
      extents.is_idle = false;
      *spot = {id, offset};
      return true;
    }
  }
  return false;
}

void Arena::give(Spot spot) {
  Extents& extents = extents_.at(spot.region);
  auto used = extents.used.find(spot.offset);
  uint64_t offset = spot.offset, size = used->second;
  auto node = extents.used.extract(used);
  auto after = extents.free.lower_bound(offset);
  if (after != extents.free.end() && after->first == offset + size) {
    size += after->second;
    after = extents.free.erase(after);
  }
  if (after != extents.free.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  node.mapped() = size;
  extents.free.insert(std::move(node));
}

uint64_t Arena::size_of(Spot spot) const {
  const auto extents = extents_.find(spot.region);
  if (extents == extents_.end()) return 0;
  const auto used = extents->second.used.find(spot.offset);
  return used == extents->second.used.end() ? 0 : used->second;
}

uint64_t Arena::size() const {
  uint64_t size = 0;
  for (const auto& [id, extents] : extents_) size += extents.region->size();
  return size;
}

std::vector<std::shared_ptr<Region>> Arena::retire_idle() {
  std::vector<std::shared_ptr<Region>> retired;
  for (auto each = extents_.begin(); each != extents_.end();) {
    Extents& extents = each->second;
    if (each->first != first_ && extents.used.empty() && std::exchange(extents.is_idle, true)) {
      retired.push_back(std::move(extents.region));
      each = extents_.erase(each);
    } else {
      ++each;
    }
  }
  return retired;
}

}  // namespace moonpool
