// Sums in 16 lanes, which are then added in pairs 8, 4, 2 and 1 apart. This order is the same on all processors.
#pragma once

#include "arr_coc/common/cpu.h"

namespace arr_coc {

constexpr int64_t kLanes = 16;

// Each step has its own array, so that arrays are read in the pieces in which they were written; otherwise reads would
// wait for memory.
template <class A>
ARR_COC_INLINE A sum_of_lanes(const A (&lanes)[kLanes]) {
  A eight[8], four[4];
#pragma omp simd
  for (int j = 0; j < 8; ++j) eight[j] = lanes[j] + lanes[j + 8];
#pragma omp simd
  for (int j = 0; j < 4; ++j) four[j] = eight[j] + eight[j + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

}  // namespace arr_coc
