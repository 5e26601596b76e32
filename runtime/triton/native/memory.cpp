#include "memory.h"

#include <algorithm>
#include <string>

namespace moonpool {
namespace {

constexpr size_t kManyReleased = 64;
constexpr uint64_t kAlignment = 64;

[[noreturn]] void refuse(const wire::Block& block, const char* why) {
  throw Violation("a block of " + std::to_string(block.size) + " bytes at " + std::to_string(block.offset) +
                  " in region " + std::to_string(block.region) + ", " + why);
}

[[noreturn]] void refuse(const wire::Place& place, const char* what, const char* why) {
  throw Violation(std::string("the stub ") + what + " block " + std::to_string(place.region) + "+" +
                  std::to_string(place.offset) + ", which it " + why);
}

// As in ipc/tensors.py, so that no product of it and the size of an item passes what a size may be.
constexpr uint64_t kMaxElements = uint64_t{1} << 59;

}  // namespace

std::optional<uint64_t> elements_of(const List<uint64_t>& shape) {
  uint64_t elements = 1, bound = 1;
  for (const uint64_t dimension : shape) {
    elements *= dimension;
    if (dimension > 0 && bound > kMaxElements / dimension) return std::nullopt;
    bound *= std::max<uint64_t>(dimension, 1);
  }
  return elements;
}

Loans::Loans(std::shared_ptr<Region> first, RegionSource& source) : source_(source), first_region_(first->id()) {
  parts_[first_region_].region = std::move(first);
}

// The first gap that is large enough is taken, so that low addresses are used again and again and stay in the processor's
// cache.
bool Loans::place(Part& part, const Loan& loan, uint64_t* offset) {
  *offset = 0;
  auto next = part.loans.begin();
  for (; next != part.loans.end() && next->first - *offset < loan.size; ++next) {
    *offset = next->first + next->second.size;
  }
  if (next == part.loans.end() && part.region->size() - *offset < loan.size) return false;
  part.loans.emplace_hint(next, *offset, loan);
  part.is_idle = false;
  return true;
}

Spot Loans::lend(uint64_t size, char** memory, bool keep) {
  const Loan loan{std::max((size + kAlignment - 1) & -kAlignment, kAlignment), keep, false, 0};
  uint64_t offset = 0, present = 0;
  std::lock_guard lock(mutex_);
  auto part = parts_.begin();
  for (; part != parts_.end() && !place(part->second, loan, &offset); ++part) {
    present += part->second.region->size();
  }
  if (part == parts_.end()) {
    auto region = source_.create(wire::Side::RUNTIME, present, loan.size);
    source_.announce(*region, wire::Side::RUNTIME);
    part = parts_.emplace(region->id(), Part{region, {}}).first;
    place(part->second, loan, &offset);
  }
  *memory = part->second.region->at(offset);
  const Spot spot{part->first, offset};
  if (!keep) batch_.push_back(spot);
  return spot;
}

// None where nothing is lent, or not any more.
Loans::Loan* Loans::find(const Spot& spot) {
  const auto part = parts_.find(spot.region);
  if (part == parts_.end()) return nullptr;
  const auto loan = part->second.loans.find(spot.offset);
  return loan == part->second.loans.end() ? nullptr : &loan->second;
}

View Loans::look(const wire::Block& block, unsigned more_holds) {
  std::lock_guard lock(mutex_);
  Loan* loan = find({block.region, block.offset});
  if (!loan || loan->is_over || block.size > loan->size) refuse(block, "which is not the stub's to name");
  loan->holds += more_holds;
  const auto& region = parts_.at(block.region).region;
  return {region, region->at(block.offset), block.size};
}

void Loans::let_go(Spot spot) {
  std::lock_guard lock(mutex_);
  Loan* loan = find(spot);
  --loan->holds;
  if (loan->is_over) end(spot, *loan);
}

void Loans::end(const Spot& spot, Loan& loan) {
  loan.is_over = true;
  if (loan.holds == 0) parts_.at(spot.region).loans.erase(spot.offset);
}

void Loans::end_batch(const List<wire::Place>& held) {
  std::lock_guard lock(mutex_);
  for (const wire::Place& place : held) {
    const auto each = std::find_if(batch_.begin(), batch_.end(), [&](const Spot& spot) {
      return spot.region == place.region && spot.offset == place.offset;
    });
    if (each == batch_.end()) refuse(place, "keeps", "was not given");
    find(place)->is_kept = true;
    batch_.erase(each);
  }
  for (const Spot& spot : batch_) end(spot, *find(spot));
  batch_.clear();
}

void Loans::take_back(const Spot& spot) {
  std::lock_guard lock(mutex_);
  Loan* loan = find(spot);
  if (!loan || !loan->is_kept || loan->is_over) refuse(spot, "releases", "does not hold");
  end(spot, *loan);
}

void Loans::tidy() {
  std::lock_guard lock(mutex_);
  for (auto each = parts_.begin(); each != parts_.end();) {
    Part& part = each->second;
    const bool is_unused = each->first != first_region_ && part.loans.empty();
    if (is_unused && std::exchange(part.is_idle, true)) {
      const uint64_t region = each->first;
      source_.retire(region);
      each = parts_.erase(each);
      source_.give_back(wire::Side::RUNTIME, region);
    } else {
      ++each;
    }
  }
}

bool Loans::has_grown() {
  std::lock_guard lock(mutex_);
  return parts_.size() > 1;
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
  return released_.size() >= kManyReleased;
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
  // In this order: it may answer from there as soon as it knows.
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
