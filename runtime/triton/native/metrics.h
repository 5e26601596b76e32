// The custom metrics that one stub holds, by the numbers that it knows them by.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "api.h"
#include "wire.h"

namespace moonpool {

// What it holds in the server it gives back at its end. One thread at a time.
class Metrics {
 public:
  // The model of a stub that is contained may not pass its figures off as the server's.
  explicit Metrics(bool is_contained) : is_contained_(is_contained) {}

  // Whether there ever was one. From any thread.
  bool were_held() const { return next_ > 1; }
  // The number of another metric, or of a family alone. Throws Failure.
  uint64_t hold(const wire::NewMetric& asked);
  // How many observations that was. Throws Violation for what no honest stub sends.
  uint64_t change(const wire::Metrics& said);
  // The value of a counter or a gauge. Throws Failure, Violation.
  double value(uint64_t number);
  // The stub is gone, and holds nothing any more.
  void drop_all() noexcept;

 private:
  struct Family;
  struct Metric;
  struct Held {
    std::shared_ptr<Family> family;  // in this order: it has to outlive its metrics
    std::shared_ptr<Metric> metric;  // null: the family alone
    uint64_t size;
  };
  using FamilyName = std::pair<std::string, uint64_t>;
  struct Families;
  static Families& families();
  std::shared_ptr<Family> family(const wire::NewMetric& asked);
  Held* known(uint64_t number, const char* message);
  void drop(uint64_t number);

  const bool is_contained_;
  std::map<uint64_t, Held> held_;
  std::atomic<uint64_t> next_{1};
  uint64_t size_ = 0;
};

}  // namespace moonpool
