#include "metrics.h"

#include <mutex>
#include <vector>

#include "memory.h"
#include "parameters.h"

namespace moonpool {
namespace {

// Families and metrics together; and what all of them may take, in characters as they are shown.
constexpr size_t kMaxHeld = 10'000;
constexpr uint64_t kMaxSize = 16 << 20;
constexpr uint64_t kNumberSize = 32;
// Observations in one message: each is a call, which nothing else of the stub's waits for longer than this.
constexpr uint64_t kMaxObservations = 1 << 20;

}  // namespace

struct Metrics::Family {
  Family(const FamilyName& named, std::string_view description) : name(named) {
    check(triton::MetricFamilyNew(&made, static_cast<int>(name.second), name.first.c_str(),
                                  std::string(description).c_str()));
  }
  ~Family() { complain(triton::MetricFamilyDelete(made), "a family of metrics cannot be deleted"); }
  Family(const Family&) = delete;

  const FamilyName name;
  triton::MetricFamily* made;
};

struct Metrics::Metric {
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
    triton::Error* error =
        triton::MetricArgsSetHistogram(arguments, buckets.data(), buckets.size());
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

uint64_t Metrics::hold(const wire::NewMetric& asked) {
  if (held_.size() >= kMaxHeld) {
    throw Failure(triton::kInvalidArg, "a model instance has at most " + std::to_string(kMaxHeld) +
                                           " metrics; use labels with fewer values");
  }
  if (is_contained_ && (asked.name.rfind("nv_", 0) == 0 || asked.name.rfind("moonpool_", 0) == 0)) {
    throw Failure(triton::kInvalidArg, "the metric '" + std::string(asked.name) +
                                           "' would pass for one of the server's; in this sandbox no "
                                           "name begins with nv_ or moonpool_");
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

// Of one name and kind there is one family for all stubs: the server forgets a time series with the first of its
// families that lets go of it, and the others would go on to use it.
struct Metrics::Families {
  std::mutex mutex;
  std::map<FamilyName, std::weak_ptr<Family>> known;
};

Metrics::Families& Metrics::families() {
  static Families* const shared = new Families;  // outlives whatever ends with the process
  return *shared;
}

std::shared_ptr<Metrics::Family> Metrics::family(const wire::NewMetric& asked) {
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

uint64_t Metrics::change(const wire::Metrics& said) {
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

double Metrics::value(uint64_t number) {
  const Held* held = known(number, "METRIC_VALUE");
  if (!held) throw Failure(triton::kInvalidArg, "the metric has been deleted");
  if (!held->metric) {
    throw Violation("METRIC_VALUE of " + std::to_string(number) + ", which is a family");
  }
  double value;
  check(triton::MetricValue(held->metric->made, &value));
  return value;
}

// Null where it was dropped.
Metrics::Held* Metrics::known(uint64_t number, const char* message) {
  if (number == 0 || number >= next_) {
    throw Violation(std::string(message) + " of metric " + std::to_string(number) +
                    ", which there never was");
  }
  const auto held = held_.find(number);
  return held == held_.end() ? nullptr : &held->second;
}

void Metrics::drop(uint64_t number) {
  const auto held = held_.find(number);
  size_ -= held->second.size;
  auto& [mutex, known] = families();
  std::lock_guard lock(mutex);
  if (held->second.family.use_count() == 1) known.erase(held->second.family->name);
  held_.erase(held);
}

void Metrics::drop_all() noexcept {
  while (!held_.empty()) drop(held_.begin()->first);
}

}  // namespace moonpool
