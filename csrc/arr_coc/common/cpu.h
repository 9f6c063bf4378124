// Helpers of the CPU kernels.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

// Marks a function with a loop (or a template) to be compiled once per x86-64 level. The processor's best version is
// picked when the library loads, so that one file runs everywhere and is as fast as one built with -march=native.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ARR_COC_EVERY_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ARR_COC_EVERY_ISA
#endif

// Marks functions called in such loops. Without inlining they would be compiled once, for the oldest processor.
#define ARR_COC_INLINE inline __attribute__((always_inline))

namespace arr_coc {

// The device of an adapter: `run(const Cpu&, ...)` has the loops. It holds nothing, unlike Cuda.
struct Cpu {
  explicit Cpu(const Tensor&) {}
};

// The least share of a thread that is worth the cost of waking it, in elements of simple arithmetic.
constexpr int64_t kGrain = 32768;

// Runs f(begin, end) over [0, rows) on torch's threads. A row costs about as much as `row_cost` elements.
template <class F>
void parallel_rows(int64_t rows, int64_t row_cost, const F& f) {
  if (rows == 0) return;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_cost)), f);
}

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
