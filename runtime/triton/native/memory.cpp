#include "memory.h"

#include <algorithm>
#include <string>

namespace moonpool {
namespace {

constexpr size_t kManyReleased = 64;

[[noreturn]] void refuse(const wire::Block& block, const char* why) {
  throw Violation("a block of " + std::to_string(block.size) + " bytes at " +
                  std::to_string(block.offset) + " in region " + std::to_string(block.region) + ", " +
                  why);
}

[[noreturn]] void refuse(const wire::Place& place, const char* what, const char* why) {
  throw Violation(std::string("the stub ") + what + " block " + std::to_string(place.region) + "+" +
                  std::to_string(place.offset) + ", which it " + why);
}

}  // namespace

Loans::Loans(std::shared_ptr<Region> first, RegionSource& source)
    : source_(source), first_region_(first->id()) {
  arena_.add(std::move(first));
}

Spot Loans::lend(uint64_t size, char** memory, bool keep) {
  std::lock_guard lock(mutex_);
  Spot spot;
  if (!arena_.take(size, &spot)) {
    auto region = source_.create(arena_.size(), size);
    source_.announce(*region, wire::Side::RUNTIME);
    arena_.add(std::move(region));
    arena_.take(size, &spot);
  }
  loans_.insert_or_assign(spot, Loan{keep, false, 0});
  if (!keep) batch_.push_back(spot);
  *memory = arena_.region(spot.region)->at(spot.offset);
  return spot;
}

View Loans::look(const wire::Block& block) {
  const Spot spot{block.region, block.offset};
  std::lock_guard lock(mutex_);
  const auto loan = loans_.find(spot);
  if (loan == loans_.end() || loan->second.is_over || block.size > arena_.size_of(spot)) {
    refuse(block, "which is not the stub's to name");
  }
  auto region = arena_.region(spot.region);
  return {region, region->at(spot.offset), block.size};
}

void Loans::hold(Spot spot) {
  std::lock_guard lock(mutex_);
  const auto loan = loans_.find(spot);
  if (loan != loans_.end()) ++loan->second.holds;
}

void Loans::let_go(Spot spot) {
  std::lock_guard lock(mutex_);
  const auto loan = loans_.find(spot);
  if (loan != loans_.end() && --loan->second.holds == 0 && loan->second.is_over) end(loan);
}

void Loans::end(Each loan) {
  loan->second.is_over = true;
  if (loan->second.holds > 0) return;
  arena_.give(loan->first);
  loans_.erase(loan);
}

void Loans::end_batch(const List<wire::Place>& held) {
  std::lock_guard lock(mutex_);
  for (const wire::Place& place : held) {
    const Spot spot{place.region, place.offset};
    const auto each = std::find_if(batch_.begin(), batch_.end(), [&](const Spot& other) {
      return !(spot < other) && !(other < spot);
    });
    if (each == batch_.end()) refuse(place, "keeps", "was not given");
    loans_.at(spot).is_kept = true;
    batch_.erase(each);
  }
  for (const Spot& spot : batch_) end(loans_.find(spot));
  batch_.clear();
}

void Loans::take_back(const wire::Place& place) {
  std::lock_guard lock(mutex_);
  const auto loan = loans_.find(Spot{place.region, place.offset});
  if (loan == loans_.end() || !loan->second.is_kept || loan->second.is_over) {
    refuse(place, "releases", "does not hold");
  }
  end(loan);
}

void Loans::tidy() {
  std::lock_guard lock(mutex_);
  for (const auto& region : arena_.retire_idle()) source_.retire(region->id());
}

bool Loans::has_grown() {
  std::lock_guard lock(mutex_);
  return arena_.has_grown();
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
  released_.push_back({spot.region, spot.offset});
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
  auto region = source_.create(present, needed);
  {
    std::lock_guard lock(mutex_);
    regions_.emplace(region->id(), region);
  }
  // In this order: it may answer from there as soon as it knows.
  source_.announce(*region, wire::Side::STUB);
}

void Answers::retire(uint64_t region) {
  std::lock_guard lock(mutex_);
  if (regions_.size() == 1 || regions_.erase(region) == 0) {
    throw Violation("region " + std::to_string(region) + " is not the stub's to retire");
  }
}

bool Answers::has_grown() {
  std::lock_guard lock(mutex_);
  return regions_.size() > 1;
}

}  // namespace moonpool
