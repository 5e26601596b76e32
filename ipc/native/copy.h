// Copies the bytes of tensors, large ones past the processor's caches.
//
// A tensor that is larger than its share of the last cache is in memory again when the other process reads it, so it
// need not go through the caches of the writer. Stores that bypass them save reading the old contents of each line,
// and leave what lies in the caches alone. A smaller one is quicker through the caches, in which the other core finds
// it. The C library goes past them only above three quarters of the last cache, which a virtual machine shares with
// strangers. Where the processor is none with SSE2, this is `memcpy`.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace moonpool {

// A copy of at least this size, and of at least this share of the last cache, goes past the caches.
constexpr size_t kPastCaches = size_t{4} << 20, kShareOfCache = 8;

#ifdef __SSE2__
// One line after the other. Processors differ in how many pages they write at a time past the caches: on some, lines
// of four pages in turn take several times as long.
inline void copy_past_caches(char* target, const char* source, size_t size) {
  constexpr size_t kWord = sizeof(__m128i), kLine = 4 * kWord;
  // Read so far ahead as a line takes to come from memory. Into all caches: hints for reads past them too take twice
  // as long where the source lies in the last one.
  constexpr size_t kAhead = 16 * kLine;
  // Stores past the caches need aligned addresses.
  size_t done = std::min(-reinterpret_cast<uintptr_t>(target) % kLine, size);
  std::memcpy(target, source, done);
  for (; size - done >= kLine; done += kLine) {
    auto* to = reinterpret_cast<__m128i*>(target + done);
    const auto* from = reinterpret_cast<const __m128i*>(source + done);
    _mm_prefetch(source + done + std::min(kAhead, size - done - kLine), _MM_HINT_T0);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  // Other processes must not see a message about this memory earlier than its contents.
  _mm_sfence();
  std::memcpy(target + done, source + done, size - done);
}
#else
inline void copy_past_caches(char* target, const char* source, size_t size) { std::memcpy(target, source, size); }
#endif

// Returns the bytes of the last cache, 0 if the system does not tell.
inline size_t last_cache_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  return static_cast<size_t>(std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L));
#else
  return 0;
#endif
}

inline void copy(char* target, const char* source, size_t size) {
  if (size < kPastCaches || size < last_cache_bytes() / kShareOfCache) {
    std::memcpy(target, source, size);
  } else {
    copy_past_caches(target, source, size);
  }
}

}  // namespace moonpool
