// Asking for what a loop will read before it does. Where a tensor is larger than the second cache, processors that
// were measured (docs/performance.md) fetch ahead too little on their own: loops that read two streams and write one
// take 10 to 30 % longer.
#pragma once

#include "common/cpu.h"

namespace arr_coc {

// Elements that a loop computes between two requests: some cache lines, and whole vectors on every processor.
constexpr int64_t kPrefetchBlock = 64;

// Requests `count` elements. They may lie behind a tensor's end: nothing is read.
template <class T>
ARR_COC_INLINE void prefetch(const T* data, int64_t count = kPrefetchBlock) {
  constexpr int64_t kLine = 64;
  const char* first = reinterpret_cast<const char*>(data);
  for (int64_t byte = 0; byte < count * int64_t(sizeof(T)); byte += kLine) __builtin_prefetch(first + byte);
}

// Requests `count` elements as far behind `data` as a loop gets while memory answers.
template <class T>
ARR_COC_INLINE void prefetch_behind(const T* data, int64_t count = kPrefetchBlock) {
  constexpr int64_t kDistance = 2048;
  prefetch(data + kDistance / int64_t(sizeof(T)), count);
}

}  // namespace arr_coc
