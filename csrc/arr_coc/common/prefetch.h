// Prefetches data for loops. If a tensor is larger than the second cache, the measured processors (docs/performance.md)
// prefetch too little: loops that read two streams and write one take 10 to 30 % longer.
#pragma once

#include "arr_coc/common/cpu.h"

namespace arr_coc {

// The elements between two requests: several cache lines, and whole vectors on every processor.
constexpr int64_t kPrefetchBlock = 64;

// Requests `count` elements. They may lie beyond a tensor's end, because nothing is read.
template <class T>
ARR_COC_INLINE void prefetch(const T* data, int64_t count = kPrefetchBlock) {
  constexpr int64_t kLine = 64;
  const char* first = reinterpret_cast<const char*>(data);
  for (int64_t byte = 0; byte < count * int64_t(sizeof(T)); byte += kLine) __builtin_prefetch(first + byte);
}

// Requests `count` elements one memory latency ahead of `data`.
template <class T>
ARR_COC_INLINE void prefetch_behind(const T* data, int64_t count = kPrefetchBlock) {
  constexpr int64_t kDistance = 2048;
  prefetch(data + kDistance / int64_t(sizeof(T)), count);
}

}  // namespace arr_coc
