// Copies the bytes of tensors, large ones past the processor's caches.
//
// A tensor of some megabytes is written by one process and read by another, later and perhaps on another core, so it
// need not go through the caches of the writer. Stores that bypass them save reading the old contents of each line,
// and leave what lies in the caches alone. The C library does this only above three quarters of the last cache, which
// a virtual machine shares with strangers. Where the processor is none with SSE2, this is `memcpy`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace moonpool {

// From here on a copy past the caches is quicker: what is copied is not left in the caches of a core anyway.
constexpr size_t kPastCaches = size_t{4} << 20;

#ifdef __SSE2__
// One line after the other. Processors differ in how many pages they write at a time past the caches: on some, lines
// of four pages in turn take several times as long.
inline void copy_past_caches(char* target, const char* source, size_t size) {
  constexpr size_t kWord = sizeof(__m128i), kLine = 4 * kWord;
  // Read so far ahead as a line takes to come from memory.
  constexpr size_t kAhead = 16 * kLine;
  // Stores past the caches need aligned addresses.
  size_t done = std::min(-reinterpret_cast<uintptr_t>(target) % kLine, size);
  std::memcpy(target, source, done);
  for (; size - done >= kLine; done += kLine) {
    auto* to = reinterpret_cast<__m128i*>(target + done);
    const auto* from = reinterpret_cast<const __m128i*>(source + done);
    _mm_prefetch(source + done + std::min(kAhead, size - done - kLine), _MM_HINT_NTA);
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

inline void copy(char* target, const char* source, size_t size) {
  if (size < kPastCaches) {
    std::memcpy(target, source, size);
  } else {
    copy_past_caches(target, source, size);
  }
}

}  // namespace moonpool
