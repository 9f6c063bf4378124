// Finds the k smallest of n keys by radix select, with a histogram of one digit at a time. Counts are integers, so the
// order of atomics does not matter.
#pragma once

#include "arr_coc/common/cuda.cuh"

namespace arr_coc {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kSelectBits = 11;
constexpr int kSelectBins = 1 << kSelectBits;
constexpr unsigned kFullWarp = 0xffffffffu;

// The sum of `value` over the threads before this one, in a block of kSelectThreads; `total` gets the sum over all.
// `shared` holds one value per warp and may be reused after the call.
template <class T>
__device__ __forceinline__ T block_exclusive_sum(T value, T* shared, T& total) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  T inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const T before = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += before;
  }
  if (lane == kWarpSize - 1) shared[warp] = inclusive;
  __syncthreads();
  static_assert(kSelectWarps == kWarpSize, "one lane holds one warp's sum");
  T warps = shared[lane];
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const T before = __shfl_up_sync(kFullWarp, warps, offset);
    if (lane >= offset) warps += before;
  }
  total = __shfl_sync(kFullWarp, warps, kWarpSize - 1);
  const T earlier = __shfl_sync(kFullWarp, warps, warp > 0 ? warp - 1 : 0);
  __syncthreads();
  return (warp > 0 ? earlier : T(0)) + inclusive - value;
}

struct SelectShared {
  unsigned histogram[kSelectBins];
  int64_t sums[kSelectWarps];
  int64_t before, count;  // of the bin in which the k-th key lies: keys before it, keys in it
  unsigned bin;
};

// The k smallest keys are those with (key >> shift) < prefix, and the first `ties` with (key >> shift) == prefix.
template <class Key>
struct Cut {
  Key prefix;
  int shift;
  int64_t ties;
  __device__ bool below(Key key) const { return (key >> shift) < prefix; }
  __device__ bool equal(Key key) const { return (key >> shift) == prefix; }
};

// All threads of a block of kSelectThreads call it. `key_at(i)` returns the key of element i < n, of `bits` bits;
// 1 <= k <= n.
template <int bits, class Key, class KeyAt>
__device__ Cut<Key> block_select(const KeyAt& key_at, int64_t n, int64_t k, SelectShared& shared) {
  constexpr int per_thread = kSelectBins / kSelectThreads;
  constexpr int64_t chunk = int64_t(1) << 30;  // few enough keys that a 32-bit counter cannot overflow
  Key prefix = 0;
  int64_t rank = k;
  for (int top = bits;;) {
    const int shift = top > kSelectBits ? top - kSelectBits : 0;
    int64_t counts[per_thread] = {};
    for (int64_t first = 0; first < n; first += chunk) {
      for (int bin = threadIdx.x; bin < kSelectBins; bin += kSelectThreads) shared.histogram[bin] = 0;
      __syncthreads();
      const int64_t last = min(n, first + chunk);
      // Whole warps stay in the loop, so that a warp with keys in one bin counts them in one addition.
      for (int64_t base = first + (threadIdx.x / kWarpSize) * kWarpSize; base < last; base += kSelectThreads) {
        const int64_t i = base + threadIdx.x % kWarpSize;
        int bin = -1;
        if (i < last) {
          const Key key = key_at(i);
          if (top == bits || (key >> top) == prefix) bin = int((key >> shift) & ((Key(1) << (top - shift)) - 1));
        }
        int uniform;
        __match_all_sync(kFullWarp, bin, &uniform);
        if (uniform) {
          if (bin >= 0 && threadIdx.x % kWarpSize == 0) atomicAdd(&shared.histogram[bin], unsigned(kWarpSize));
        } else if (bin >= 0) {
          atomicAdd(&shared.histogram[bin], 1u);
        }
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < per_thread; ++j) counts[j] += shared.histogram[threadIdx.x * per_thread + j];
      __syncthreads();
    }
    int64_t mine = 0, total;
#pragma unroll
    for (int j = 0; j < per_thread; ++j) mine += counts[j];
    int64_t before = block_exclusive_sum(mine, shared.sums, total);
#pragma unroll
    for (int j = 0; j < per_thread; ++j) {
      if (before < rank && rank <= before + counts[j]) {
        shared.bin = threadIdx.x * per_thread + j;
        shared.before = before;
        shared.count = counts[j];
      }
      before += counts[j];
    }
    __syncthreads();
    prefix = (prefix << (top - shift)) | Key(shared.bin);
    rank -= shared.before;
    const bool whole_bin = shared.count == rank;
    __syncthreads();
    if (shift == 0 || whole_bin) return {prefix, shift, rank};
    top = shift;
  }
}

// Walks the elements in order, a block's width at a time, and calls chosen(i, slot, key) for every chosen one: slots
// are 0 .. k - 1 in the order of i. All threads call it.
template <class Key, class KeyAt, class Chosen>
__device__ void block_compact(const Cut<Key>& cut, const KeyAt& key_at, int64_t n, int64_t* sums, Chosen&& chosen) {
  int64_t below_before = 0, equal_before = 0;
  for (int64_t base = 0; base < n; base += kSelectThreads) {
    const int64_t i = base + threadIdx.x;
    const Key key = i < n ? key_at(i) : Key(0);
    const bool below = i < n && cut.below(key), equal = i < n && cut.equal(key);
    int64_t total;
    // Two counts in one sum: those below in the low half.
    const int64_t packed = int64_t(below) | (int64_t(equal) << 32);
    const int64_t earlier = block_exclusive_sum(packed, sums, total);
    const int64_t tie = equal_before + (earlier >> 32);
    const int64_t slot = below_before + (earlier & 0xffffffff) + min(tie, cut.ties);
    if (below || (equal && tie < cut.ties)) chosen(i, slot, key);
    below_before += total & 0xffffffff;
    equal_before += total >> 32;
  }
}

}  // namespace arr_coc
