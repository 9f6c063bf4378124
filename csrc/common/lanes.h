// Sums in 16 lanes, which are then added in pairs 8, 4, 2 and 1 apart: in an order that no processor changes.
#pragma once

#include "common/cpu.h"

namespace arr_coc {

constexpr int64_t kLanes = 16;

// An array for each step, so that none is read in other pieces than it was written in, which would wait for memory.
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
