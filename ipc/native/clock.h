// The clock of all that is compiled, which is Python's own for times in a request.
#pragma once

#include <time.h>

#include <cstdint>

namespace moonpool {

inline int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

}  // namespace moonpool
