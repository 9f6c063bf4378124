// What the CPU kernels share.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/checks.h"

namespace arr_coc {

// One thread's share should outweigh the cost of waking it: about this many elements of simple arithmetic.
constexpr int64_t kGrain = 32768;

// Runs f(begin, end) over [0, rows) on torch's threads, where a row costs about `row_cost` elements' work.
template <class F>
void parallel_rows(int64_t rows, int64_t row_cost, const F& f) {
  if (rows == 0) return;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_cost)), f);
}

}  // namespace arr_coc
