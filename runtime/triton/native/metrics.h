// The custom metrics that one stub holds, by the numbers that it knows them by.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "api.h"
#include "memory.h"
#include "parameters.h"
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
  uint64_t hold(const wire::NewMetric& asked) {
    if (held_.size() >= kMaxHeld) {
      throw Failure(triton::kInvalidArg, "a model instance has at most " + std::to_string(kMaxHeld) +
                                             " metrics; use labels with fewer values");
    }
    if (is_contained_ && is_servers(asked)) {
      throw Failure(triton::kInvalidArg, "the metric '" + std::string(asked.name) +
                                             "' would pass for one of the server's; in this sandbox no "
                                             "name begins with nv_, moonpool_, process_ or python_");
    }
    uint64_t line = asked.name.size() + kNumberSize, size = asked.description.size();
    if (asked.labels) {
      for (const wire::NewMetricLabels& label : *asked.labels) {
        line += label.name.size() + label.value.size();
      }
    }
    size += line * (1 + (asked.buckets ? asked.buckets->size() : 0));
    if (size_ + size > kMaxSize) {
      throw Failure(triton::kInvalidArg,
                    "the metrics of a model instance may take " + std::to_string(kMaxSize) +
                        " characters where they are shown; use fewer, or shorter labels, or fewer buckets");
    }
    const uint64_t number = next_++;
    Held& held = held_.emplace(number, Held{family(asked), nullptr, size}).first->second;
    size_ += size;
    try {
      if (asked.labels) held.metric = std::make_shared<Metric>(*held.family, asked);
    } catch (const Failure&) {
      drop(number);
      throw;
    }
    return number;
  }

  // How many observations that was. Throws Violation for what no honest stub sends.
  uint64_t change(const wire::Metrics& said) {
    uint64_t observations = 0;
    for (const wire::MetricsChanges& row : said.changes) {
      Held* held = known(row.metric, "METRICS");
      // Else one thread dropped it while another one changed it.
      if (!held) continue;
      if (!held->metric) {
        throw Violation("METRICS changes " + std::to_string(row.metric) + ", which is a family");
      }
      triton::Metric* metric = held->metric->made;
      triton::Error* error = nullptr;
      if (row.operation == wire::kIncrement) {
        error = triton::MetricIncrement(metric, row.value);
      } else if (row.operation == wire::kSet) {
        error = triton::MetricSet(metric, row.value);
      } else if (!triton::MetricObserve || row.count > kMaxObservations - observations) {
        throw Violation("METRICS observes more than it may");
      } else {
        observations += row.count;
        for (uint64_t left = row.count; left > 0 && !error; --left) {
          error = triton::MetricObserve(metric, row.value);
        }
      }
      if (error) {
        const std::string why = triton::ErrorMessage(error);
        triton::ErrorDelete(error);
        throw Violation("METRICS with " + why);
      }
    }
    for (const uint64_t number : said.dropped) {
      if (known(number, "METRICS")) drop(number);
    }
    return observations;
  }

  // The value of a counter or a gauge. Throws Failure, Violation.
  double value(uint64_t number) {
    const Held* held = known(number, "METRIC_VALUE");
    if (!held) throw Failure(triton::kInvalidArg, "the metric has been deleted");
    if (!held->metric) {
      throw Violation("METRIC_VALUE of " + std::to_string(number) + ", which is a family");
    }
    double value;
    check(triton::MetricValue(held->metric->made, &value));
    return value;
  }

  // The stub is gone, and holds nothing any more.
  void drop_all() noexcept {
    while (!held_.empty()) drop(held_.begin()->first);
  }

 private:
  // Families and metrics together; and what all of them may take, in characters as they are shown.
  static constexpr size_t kMaxHeld = 10'000;
  static constexpr uint64_t kMaxSize = 16 << 20;
  static constexpr uint64_t kNumberSize = 32;
  // Observations in one message: each is a call, which nothing else of the stub's waits for longer than this.
  static constexpr uint64_t kMaxObservations = 1 << 20;

  // True if the name of the family, or of a line of it, begins like one of the server's own, which the server does not
  // list.
  static bool is_servers(const wire::NewMetric& asked) {
    const auto begins = [](const std::string& line, std::string_view prefix) { return line.rfind(prefix, 0) == 0; };
    for (const char* suffix : {"", "_bucket", "_count", "_sum"}) {
      const std::string line = std::string(asked.name) + suffix;
      for (const char* prefix : {"nv_", "moonpool_", "process_", "python_"}) {
        if (begins(line, prefix) && (*suffix == 0 || asked.buckets)) return true;
      }
    }
    return false;
  }

  using FamilyName = std::pair<std::string, uint64_t>;
  struct Family {
    Family(const FamilyName& named, std::string_view description) : name(named) {
      check(triton::MetricFamilyNew(&made, static_cast<int>(name.second), name.first.c_str(),
                                    std::string(description).c_str()));
    }
    ~Family() { complain(triton::MetricFamilyDelete(made), "a family of metrics cannot be deleted"); }
    Family(const Family&) = delete;

    const FamilyName name;
    triton::MetricFamily* made;
  };
  struct Metric {
    Metric(const Family& family, const wire::NewMetric& asked) {
      Parameters labels;
      for (const wire::NewMetricLabels& label : *asked.labels) labels.add(label.name, label.value);
      if (!asked.buckets) {
        check(triton::MetricNew(&made, family.made, labels.data(), labels.size()));
        return;
      }
      if (!triton::MetricNewWithArgs) {
        throw Failure(triton::kUnsupported, "this tritonserver has no custom histograms");
      }
      std::vector<double> buckets;
      for (const double bucket : *asked.buckets) buckets.push_back(bucket);
      triton::MetricArgs* arguments;
      check(triton::MetricArgsNew(&arguments));
      triton::Error* error = triton::MetricArgsSetHistogram(arguments, buckets.data(), buckets.size());
      if (!error) {
        error = triton::MetricNewWithArgs(&made, family.made, labels.data(), labels.size(), arguments);
      }
      complain(triton::MetricArgsDelete(arguments), "arguments of a metric cannot be deleted");
      check(error);
    }
    ~Metric() { complain(triton::MetricDelete(made), "a metric cannot be deleted"); }
    Metric(const Metric&) = delete;

    triton::Metric* made;
  };
  struct Held {
    std::shared_ptr<Family> family;  // in this order: it has to outlive its metrics
    std::shared_ptr<Metric> metric;  // null: the family alone
    uint64_t size;
  };
  // Of one name and kind there is one family for all stubs: the server forgets a time series with the first of its
  // families that lets go of it, and the others would go on to use it.
  struct Families {
    std::mutex mutex;
    std::map<FamilyName, std::weak_ptr<Family>> known;
  };
  static Families& families() {
    static Families* const shared = new Families;  // outlives whatever ends with the process
    return *shared;
  }

  std::shared_ptr<Family> family(const wire::NewMetric& asked) {
    const FamilyName name{asked.name, asked.metric_kind};
    auto& [mutex, known] = families();
    std::lock_guard lock(mutex);
    const auto found = known.find(name);
    std::shared_ptr<Family> family = found == known.end() ? nullptr : found->second.lock();
    if (!family) {
      family = std::make_shared<Family>(name, asked.description);
      known[name] = family;
    }
    return family;
  }

  // Null where it was dropped.
  Held* known(uint64_t number, const char* message) {
    if (number == 0 || number >= next_) {
      throw Violation(std::string(message) + " of metric " + std::to_string(number) + ", which there never was");
    }
    const auto held = held_.find(number);
    return held == held_.end() ? nullptr : &held->second;
  }

  void drop(uint64_t number) {
    const auto held = held_.find(number);
    size_ -= held->second.size;
    auto& [mutex, known] = families();
    std::lock_guard lock(mutex);
    if (held->second.family.use_count() == 1) known.erase(held->second.family->name);
    held_.erase(held);
  }

  const bool is_contained_;
  std::map<uint64_t, Held> held_;
  std::atomic<uint64_t> next_{1};
  uint64_t size_ = 0;
};

}  // namespace moonpool
