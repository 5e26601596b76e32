#include "memory.h"

#include <algorithm>
#include <string>

namespace moonpool {
namespace {

[[noreturn]] void refuse(const wire::Block& block, const char* why) {
  throw Violation("a block of " + std::to_string(block.size) + " bytes at " + std::to_string(block.offset) +
                  " in region " + std::to_string(block.region) + ", " + why);
}

[[noreturn]] void refuse(const wire::Place& place, const char* what, const char* why) {
  throw Violation(std::string("the stub ") + what + " block " + std::to_string(place.region) + "+" +
                  std::to_string(place.offset) + ", which it " + why);
}

}  // namespace

BorrowedBlocks::BorrowedBlocks(std::shared_ptr<Region> first, RegionSource& source)
    : source_(source), first_region_(first->id()) {
  parts_[first_region_].region = std::move(first);
}

// Take the first gap that is large enough, so that low addresses are reused and stay in the processor's cache.
bool BorrowedBlocks::place(Part& part, const BorrowedBlock& borrowed, uint64_t* offset) {
  *offset = 0;
  auto next = part.borrowed_blocks.begin();
  for (; next != part.borrowed_blocks.end() && next->first - *offset < borrowed.size; ++next) {
    *offset = next->first + next->second.size;
  }
  if (next == part.borrowed_blocks.end() && part.region->size() - *offset < borrowed.size) return false;
  part.borrowed_blocks.emplace_hint(next, *offset, borrowed);
  part.idle_since.reset();
  return true;
}

std::shared_ptr<Region> BorrowedBlocks::create(uint64_t present, uint64_t size) {
  try {
    return source_.create(wire::Side::RUNTIME, present, size);
  } catch (const Failure&) {
    // What is kept for later may make room.
    const size_t before = parts_.size();
    for (auto each = parts_.begin(); each != parts_.end();) {
      if (each->first != first_region_ && each->second.borrowed_blocks.empty()) {
        present -= each->second.region->size();
        each = give_up(each);
      } else {
        ++each;
      }
    }
    if (parts_.size() == before) throw;
    return source_.create(wire::Side::RUNTIME, present, size);
  }
}

Spot BorrowedBlocks::lend(uint64_t size, char** memory, bool keep) {
  const BorrowedBlock borrowed{std::max((size + wire::kAlignment - 1) & -wire::kAlignment, wire::kAlignment), keep,
                               false, 0};
  uint64_t offset = 0, present = 0;
  std::lock_guard lock(mutex_);
  auto part = parts_.begin();
  for (; part != parts_.end() && !place(part->second, borrowed, &offset); ++part) {
    present += part->second.region->size();
  }
  if (part == parts_.end()) {
    auto region = create(present, borrowed.size);
    source_.announce(*region, wire::Side::RUNTIME);
    part = parts_.emplace(region->id(), Part{region, {}}).first;
    place(part->second, borrowed, &offset);
  }
  *memory = part->second.region->at(offset);
  const Spot spot{part->first, offset};
  if (!keep) batch_.push_back(spot);
  return spot;
}

// Returns null if no block is lent there, or not any more.
BorrowedBlocks::BorrowedBlock* BorrowedBlocks::find(const Spot& spot) {
  const auto part = parts_.find(spot.region);
  if (part == parts_.end()) return nullptr;
  const auto borrowed = part->second.borrowed_blocks.find(spot.offset);
  return borrowed == part->second.borrowed_blocks.end() ? nullptr : &borrowed->second;
}

View BorrowedBlocks::look(const wire::Block& block, unsigned more_holds) {
  std::lock_guard lock(mutex_);
  BorrowedBlock* borrowed = find({block.region, block.offset});
  if (!borrowed || borrowed->is_over || block.size > borrowed->size) {
    refuse(block, "which is not the stub's to answer from");
  }
  borrowed->holds += more_holds;
  const auto& region = parts_.at(block.region).region;
  return {region, region->at(block.offset), block.size};
}

void BorrowedBlocks::release(Spot spot) {
  std::lock_guard lock(mutex_);
  BorrowedBlock* borrowed = find(spot);
  --borrowed->holds;
  if (borrowed->is_over) end(spot, *borrowed);
}

void BorrowedBlocks::end(const Spot& spot, BorrowedBlock& borrowed) {
  borrowed.is_over = true;
  if (borrowed.holds == 0) parts_.at(spot.region).borrowed_blocks.erase(spot.offset);
}

void BorrowedBlocks::keep(const List<wire::Place>& held) {
  std::lock_guard lock(mutex_);
  for (const wire::Place& place : held) {
    const auto each = std::find_if(batch_.begin(), batch_.end(), [&](const Spot& spot) {
      return spot.region == place.region && spot.offset == place.offset;
    });
    if (each == batch_.end()) refuse(place, "keeps", "was not given");
    find(place)->is_kept = true;
    batch_.erase(each);
  }
}

void BorrowedBlocks::end_batch() {
  std::lock_guard lock(mutex_);
  for (const Spot& spot : batch_) end(spot, *find(spot));
  batch_.clear();
}

BorrowedBlocks::BorrowedBlock& BorrowedBlocks::kept(const Spot& spot) {
  BorrowedBlock* borrowed = find(spot);
  if (!borrowed || !borrowed->is_kept || borrowed->is_over) refuse(spot, "releases", "does not hold");
  return *borrowed;
}

void BorrowedBlocks::check_kept(const List<wire::Place>& places) {
  std::lock_guard lock(mutex_);
  for (const wire::Place& place : places) kept(place);
}

void BorrowedBlocks::take_back(const Spot& spot) {
  std::lock_guard lock(mutex_);
  end(spot, kept(spot));
}

void BorrowedBlocks::tidy() {
  std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  // Numbers of regions grow, so the lowest is that of the first one that was added.
  bool is_first = true;
  for (auto each = parts_.begin(); each != parts_.end();) {
    Part& part = each->second;
    if (each->first == first_region_) {
      ++each;
      continue;
    }
    const std::chrono::milliseconds least(std::exchange(is_first, false) ? wire::kKeepFirstMs : 0);
    if (part.borrowed_blocks.empty() && part.idle_since && now - *part.idle_since >= least) {
      each = give_up(each);
      continue;
    }
    if (part.borrowed_blocks.empty() && !part.idle_since) part.idle_since = now;
    ++each;
  }
}

std::map<uint64_t, BorrowedBlocks::Part>::iterator BorrowedBlocks::give_up(std::map<uint64_t, Part>::iterator each) {
  const uint64_t region = each->first;
  source_.retire(region);
  const auto next = parts_.erase(each);
  source_.give_back(wire::Side::RUNTIME, region);
  return next;
}

bool BorrowedBlocks::has_grown() {
  std::lock_guard lock(mutex_);
  return parts_.size() > 1;
}

size_t BorrowedBlocks::count() {
  std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [id, part] : parts_) count += part.borrowed_blocks.size();
  return count;
}

Answers::Answers(std::shared_ptr<Region> first, RegionSource& source) : source_(source) {
  regions_.emplace(first->id(), first);
}

bool Answers::has(uint64_t region) {
  std::lock_guard lock(mutex_);
  return regions_.count(region) > 0;
}

View Answers::look(const wire::Block& block) {
  std::lock_guard lock(mutex_);
  const auto region = regions_.find(block.region);
  if (region == regions_.end()) refuse(block, "which is not the stub's to answer from");
  const uint64_t size = region->second->size();
  if (block.offset > size || block.size > size - block.offset) refuse(block, "beyond its end");
  return {region->second, region->second->at(block.offset), block.size};
}

void Answers::release(Spot spot) {
  std::lock_guard lock(mutex_);
  released_.push_back(spot);
}

void Answers::take_released(std::vector<wire::Place>* places, size_t most) {
  places->clear();
  std::lock_guard lock(mutex_);
  if (released_.size() <= most) {
    places->swap(released_);
    return;
  }
  const auto rest = released_.end() - static_cast<std::ptrdiff_t>(most);
  places->assign(rest, released_.end());
  released_.erase(rest, released_.end());
}

bool Answers::has_many_released() {
  std::lock_guard lock(mutex_);
  return released_.size() >= wire::kReleaseAt;
}

void Answers::grow(uint64_t needed) {
  uint64_t present = 0;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, region] : regions_) present += region->size();
  }
  auto region = source_.create(wire::Side::STUB, present, needed);
  {
    std::lock_guard lock(mutex_);
    regions_.emplace(region->id(), region);
  }
  // Add the region first: the stub may answer from there as soon as it knows of it.
  source_.announce(*region, wire::Side::STUB);
}

void Answers::retire(uint64_t region) {
  {
    std::lock_guard lock(mutex_);
    if (regions_.size() == 1 || regions_.erase(region) == 0) {
      throw Violation("region " + std::to_string(region) + " is not the stub's to retire");
    }
  }
  source_.give_back(wire::Side::STUB, region);
}

bool Answers::has_grown() {
  std::lock_guard lock(mutex_);
  return regions_.size() > 1;
}

}  // namespace moonpool
