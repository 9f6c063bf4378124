#include <torch/csrc/stable/library.h>

#include "arr_coc/allocate_lod_tokens/allocate_lod_tokens.h"
#include "arr_coc/common/radix_select.cuh"

namespace arr_coc {
namespace {

template <class T>
__global__ void allocate_kernel(const T* scores, int64_t* tokens, int64_t size, int64_t min_tokens, int64_t spread,
                                double gamma) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += int64_t(gridDim.x) * blockDim.x) {
    tokens[i] = lod_budget(double(scores[i]), min_tokens, spread, gamma);
  }
}

constexpr int kThreads = 1024, kWarps = kThreads / kWarpSize;
constexpr int kMostCompared = 256;  // up to this many elements, comparing each with all is fastest

// Writes each element's clamped score into its place and returns the highest score to every thread.
template <class T>
__device__ double write_scores(const T* scores, int64_t* tokens, int64_t count, double* shared) {
  double highest = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const double score = lod_score(double(scores[i]));
    tokens[i] = __double_as_longlong(score);
    highest = fmax(highest, score);  // none is NaN
  }
  highest = warp_max(highest);
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = highest;
  __syncthreads();
  highest = warp_max(shared[threadIdx.x % kWarpSize]);
  __syncthreads();
  return highest;
}

// See allocate_lod_tokens.cpp. `weights` are in place.
__device__ WaterLevel water_level(const int64_t* weights, int64_t count, int64_t extra, int64_t spread, int64_t* sums) {
  int64_t unfilled = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) unfilled += weights[i];
  WaterLevel level{extra, block_sum(unfilled, sums), 0};
  for (;;) {
    int64_t full = 0;
    unfilled = 0;
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      const bool fills = level.fills(weights[i], spread);
      full += fills;
      unfilled += fills ? 0 : weights[i];
    }
    full = block_sum(full, sums);
    unfilled = block_sum(unfilled, sums);
    if (full == level.full) return level;
    level = {extra - full * spread, unfilled, full};
  }
}

// One block per sample. `tokens` holds in turn the clamped scores, the weights, the weights inverted for elements that
// get a leftover token, and the tokens. Each element is read and written by one thread only.
template <class T>
__global__ __launch_bounds__(kThreads) void allocate_total_kernel(const T* scores, int64_t* tokens, int64_t batch,
                                                                  int64_t count, int64_t min_tokens, int64_t spread,
                                                                  double gamma, int64_t extra) {
  __shared__ unsigned histogram[kSelectBins];
  __shared__ FoundBin<int64_t> found;
  __shared__ TileCounts<kThreads, 1> counts;
  __shared__ int64_t remainders[kMostCompared];
  __shared__ int64_t sums[kWarps];
  __shared__ double highest_of[kWarps];
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    int64_t* row = tokens + b * count;
    const double highest = write_scores(scores + b * count, row, count, highest_of);
    for (int64_t i = threadIdx.x; i < count; i += kThreads)
      row[i] = lod_weight(__longlong_as_double(row[i]), highest, gamma);
    const WaterLevel level = water_level(row, count, extra, spread, sums);
    Shares shares{level.rest, level.unfilled, level.unfilled == 0};
    if (shares.equal) shares.sum = max(int64_t(1), count - level.full);
    int64_t given = 0;
    for (int64_t i = threadIdx.x; i < count; i += kThreads)
      given += level.fills(row[i], spread) ? 0 : shares.product(row[i]) / shares.sum;
    const int64_t missing = level.rest - block_sum(given, sums);
    // The largest remainders first; full elements have none, and there are more remainders than missing tokens.
    const auto remainder = [&](int64_t i) {
      return level.fills(row[i], spread) ? 0 : shares.product(row[i]) % shares.sum;
    };
    if (missing > 0 && count <= kMostCompared) {
      if (threadIdx.x < count) remainders[threadIdx.x] = remainder(threadIdx.x);
      __syncthreads();
      if (threadIdx.x < count) {
        const int64_t mine = remainders[threadIdx.x];
        int before = 0;
#pragma unroll 8
        for (int j = 0; j < int(count); ++j)
          before += remainders[j] > mine || (remainders[j] == mine && j < int(threadIdx.x));
        if (before < missing) row[threadIdx.x] = ~row[threadIdx.x];
      }
    } else if (missing > 0) {
      constexpr int kBits = 64;
      const auto key_at = [&](int64_t i) { return ~uint64_t(remainder(i)); };
      Search<uint64_t> search{0, missing, kBits, false};
      while (!search.done) {
        for (int bin = threadIdx.x; bin < kSelectBins; bin += kThreads) histogram[bin] = 0;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < count; i += kThreads) {
          const uint64_t key = key_at(i);
          if (search.counts(key, kBits)) atomicAdd(&histogram[search.digit(key)], 1u);
        }
        __syncthreads();
        advance<kThreads, int64_t>(search, [&](int bin) { return int64_t(histogram[bin]); }, found);
      }
      int64_t below = 0, equal = 0;
      for (int64_t first = 0; first < count; first += kThreads) {
        const unsigned n = unsigned(min(int64_t(kThreads), count - first));
        const Keys<uint64_t, kThreads, 1> keys{{threadIdx.x < n ? key_at(first + threadIdx.x) : 0}};
        compact(keys, search.cut(), n, below, equal, counts,
                [&](unsigned i, int64_t, uint64_t) { row[first + i] = ~row[first + i]; });
        __syncthreads();
      }
    }
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      const bool leftover = row[i] < 0;
      const int64_t weight = leftover ? ~row[i] : row[i];
      row[i] =
          min_tokens + (level.fills(weight, spread) ? spread : shares.product(weight) / shares.sum + int64_t(leftover));
    }
    __syncthreads();
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const AllocateLodTokens<T>& call) {
  const auto [scores, tokens, batch, count, min_tokens, spread, gamma, extra] = call;
  if (extra) {
    device.launch(allocate_total_kernel<T>, {grid_size(batch, 1), kThreads}, scores, tokens, batch, count, min_tokens,
                  spread, gamma, *extra);
  } else {
    device.launch(allocate_kernel<T>, {grid_size(batch * count, 256), 256}, scores, tokens, batch * count, min_tokens,
                  spread, gamma);
  }
}

template void run(const Cuda&, const AllocateLodTokens<float>&);
template void run(const Cuda&, const AllocateLodTokens<double>&);
template void run(const Cuda&, const AllocateLodTokens<Half>&);
template void run(const Cuda&, const AllocateLodTokens<BFloat16>&);

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("allocate_lod_tokens", TORCH_BOX(&allocate_lod_tokens<Cuda>)); }

}  // namespace arr_coc
