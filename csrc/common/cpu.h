// What the CPU kernels share.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/contiguous.h"

// On a loop's function (templates included): compiled once per x86-64 level, the processor's best picked when the
// library loads. One file then runs everywhere and is as fast as one built with -march=native.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ARR_COC_EVERY_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ARR_COC_EVERY_ISA
#endif

// On what such a function calls in its loop: a function that is not inlined is compiled once, for the oldest processor.
#define ARR_COC_INLINE inline __attribute__((always_inline))

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
