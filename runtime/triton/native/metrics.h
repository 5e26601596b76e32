// The custom metrics of one stub, by the numbers that the stub knows them by.
//
// Theory of operation. One thread at a time uses a `Metrics`: the one that holds the lock `listening_` of its stub,
// which is the listener, or the instance's thread (`Stub::catch_up`). But all stubs of the server share families,
// because a server forgets a time series when one of its families is deleted. A lock guards their table.
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

// Holds metrics in the server, and deletes them at its end. For one thread at a time.
class Metrics {
 public:
  // The model of a contained stub may not use names that look like the server's own metrics.
  explicit Metrics(bool is_contained) : is_contained_(is_contained) {}

  // True if the stub ever had a metric. From any thread.
  bool were_held() const { return next_ > 1; }
  // Make a metric, or a family alone, and return its number. Throws Failure.
  uint64_t hold(const wire::NewMetric& asked) {
    if (held_.size() >= wire::kMaxMetrics) {
      throw Failure(triton::kInvalidArg, "a model instance has at most " + std::to_string(wire::kMaxMetrics) +
                                             " metrics; use labels with fewer values");
    }
    if (is_contained_ && is_servers(asked)) {
      throw Failure(triton::kInvalidArg, "the metric '" + std::string(asked.name) +
                                             "' would pass for one of the server's; in this sandbox no name "
                                             "is up or begins with nv_, moonpool_, process_, python_ or scrape_");
    }
    const uint64_t size = size_of(asked);
    if (size_ + size > wire::kMetricsCharacters) {
      throw Failure(triton::kInvalidArg,
                    "the metrics of a model instance may take " + std::to_string(wire::kMetricsCharacters) +
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

  // Apply changes, and return the number of observations. Throws Violation for changes that no honest stub sends.
  uint64_t change(const wire::Metrics& said) {
    uint64_t observations = 0;
    for (const wire::MetricsChanges& row : said.changes) {
      if (row.operation == wire::kObserve) observations += row.count;
    }
    if (observations > wire::kMaxObservations) {
      throw Violation("METRICS with " + std::to_string(observations) + " observations; " +
                      std::to_string(wire::kMaxObservations) + " is the most");
    }
    for (const wire::MetricsChanges& row : said.changes) {
      Held* held = known(row.metric, "METRICS");
      // If it is unknown, one thread of the model dropped it while another one changed it.
      if (!held) continue;
      if (!held->metric) {
        throw Violation("METRICS changes " + std::to_string(row.metric) + ", which is a family");
      }
      triton::Metric* metric = held->metric->made;
      triton::Error* error = nullptr;
      if (row.operation == wire::kIncrement) {
        error = triton::MetricIncrement(metric, row.value * static_cast<double>(row.count));
      } else if (row.operation == wire::kSet) {
        error = triton::MetricSet(metric, row.value);
      } else if (!triton::MetricObserve) {
        throw Violation("METRICS observes, and this tritonserver has no histograms");
      } else {
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

  // Returns the value of a counter or a gauge. Throws Failure, Violation.
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

  // Delete all metrics, because the stub has ended.
  void drop_all() noexcept {
    while (!held_.empty()) drop(held_.begin()->first);
  }

 private:
  // Returns the length of a metric, or of a family alone, in the exposition, in characters; as in
  // runtime/observe/metrics.py.
  static uint64_t size_of(const wire::NewMetric& asked) {
    const uint64_t part = wire::kMetricPartCharacters;
    if (!asked.labels) return part + asked.name.size() + asked.description.size();
    uint64_t line = part + asked.name.size();
    for (const wire::NewMetricLabels& label : *asked.labels) line += part + label.name.size() + label.value.size();
    // A line for each bucket and the last one, the sum and the count.
    return asked.buckets ? line * (asked.buckets->size() + 3) : line;
  }

  // Returns true if the name of the family, or of one of its lines, begins like the server's own, which the server does
  // not list, or if Prometheus makes that name for each server.
  static bool is_servers(const wire::NewMetric& asked) {
    if (asked.name == "up") return true;
    const auto begins = [](const std::string& line, std::string_view prefix) { return line.rfind(prefix, 0) == 0; };
    for (const char* suffix : {"", "_bucket", "_count", "_sum"}) {
      const std::string line = std::string(asked.name) + suffix;
      for (const char* prefix : {"nv_", "moonpool_", "process_", "python_", "scrape_"}) {
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
  // All stubs share one family of a name and kind. The server forgets a time series when the first of its families is
  // deleted, and the others would go on using it.
  struct Families {
    std::mutex mutex;
    std::map<FamilyName, std::weak_ptr<Family>> known;
  };
  static Families& families() {
    static Families* const shared = new Families;  // never deleted, as threads may use it until the process ends
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

  // Returns null if it was dropped.
  Held* known(uint64_t number, const char* message) {
    if (number == 0 || number >= next_) {
      throw Violation(std::string(message) + " of metric " + std::to_string(number) + ", which never existed");
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
