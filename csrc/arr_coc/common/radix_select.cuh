// Finds the k smallest of n keys by radix select, with a histogram of one digit at a time. Counts are integers, so the
// order of atomics does not matter.
#pragma once

#include "arr_coc/common/cuda.cuh"
#include "arr_coc/common/ordered_key.h"

namespace arr_coc {

constexpr int kSelectBits = 11;
constexpr int kSelectBins = 1 << kSelectBits;
constexpr unsigned kFullWarp = 0xffffffffu;

// The k smallest keys are those with (key >> shift) < prefix, and the first `ties` with (key >> shift) == prefix.
template <class Key>
struct Cut {
  Key prefix;
  int shift;
  int64_t ties;
  __device__ bool below(Key key) const { return (key >> shift) < prefix; }
  __device__ bool equal(Key key) const { return (key >> shift) == prefix; }
};

// The state of the search for the k-th key: the key starts with the prefix's digits (all above `top`) and is the
// rank-th of such keys. When `done`, the cut is at `top`.
template <class Key>
struct Search {
  Key prefix;
  int64_t rank;
  int top;
  bool done;

  __device__ int shift() const { return top > kSelectBits ? top - kSelectBits : 0; }
  __device__ bool counts(Key key, int bits) const { return top == bits || (key >> top) == prefix; }
  __device__ unsigned digit(Key key) const { return unsigned(key >> shift()) & ((1u << (top - shift())) - 1); }
  __device__ Cut<Key> cut() const { return {prefix, top, rank}; }
};

template <class Count>
struct FoundBin {
  Count before, count;  // keys in the bins before it, keys in it
  unsigned bin;
  Count sums[kWarpSize];  // one a warp
};

// Steps to the next digit, given the histogram of this one: `take(bin)` gives a bin's count, each bin to one thread.
template <int kThreads, class Count, class Key, class Take>
__device__ __forceinline__ void advance(Search<Key>& search, const Take& take, FoundBin<Count>& shared) {
  constexpr int per_thread = kSelectBins / kThreads;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Count counts[per_thread], mine = 0;
#pragma unroll
  for (int j = 0; j < per_thread; ++j) mine += counts[j] = take(threadIdx.x * per_thread + j);
  Count inclusive = mine;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const Count before = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += before;
  }
  if (lane == kWarpSize - 1) shared.sums[warp] = inclusive;
  __syncthreads();
  Count before = warp_sum(lane < warp ? shared.sums[lane] : Count(0)) + inclusive - mine;
#pragma unroll
  for (int j = 0; j < per_thread; ++j) {
    if (before < search.rank && search.rank <= before + counts[j]) {
      shared.bin = threadIdx.x * per_thread + j;
      shared.before = before;
      shared.count = counts[j];
    }
    before += counts[j];
  }
  __syncthreads();
  const int shift = search.shift();
  search.prefix = (search.prefix << (search.top - shift)) | Key(shared.bin);
  search.rank -= shared.before;
  search.top = shift;
  search.done = shift == 0 || shared.count == search.rank;
}

// kItems keys per thread: thread t has elements t, t + kThreads, ... of which the first n exist.
template <class Key, int kThreads, int kItems>
struct Keys {
  Key key[kItems];
  static constexpr int size = kItems * kThreads;

  template <class T>
  __device__ __forceinline__ void load(const T* scores, unsigned n) {
#pragma unroll
    for (int j = 0; j < kItems; ++j) key[j] = exists(j, n) ? descending_key(scores[element(j)]) : Key(0);
  }
  static __device__ __forceinline__ unsigned element(int j) { return j * kThreads + threadIdx.x; }
  static __device__ __forceinline__ bool exists(int j, unsigned n) { return element(j) < n; }

  __device__ __forceinline__ void count(const Search<Key>& search, int bits, unsigned n, unsigned* histogram) const {
#pragma unroll
    for (int j = 0; j < kItems; ++j)
      if (exists(j, n) && search.counts(key[j], bits)) atomicAdd(&histogram[search.digit(key[j])], 1u);
  }
};

template <int kThreads, int kItems>
struct TileCounts {
  unsigned below[kItems][kThreads / kWarpSize], equal[kItems][kThreads / kWarpSize];
};

// Calls chosen(element, slot, key) for every chosen key of a tile, in the order of the elements. Slots continue after
// earlier tiles. `below` and `equal` count the chosen keys so far.
template <class Key, int kThreads, int kItems, class Count, class Chosen>
__device__ __forceinline__ void compact(const Keys<Key, kThreads, kItems>& keys, const Cut<Key>& cut, unsigned n,
                                        Count& below, Count& equal, TileCounts<kThreads, kItems>& shared,
                                        Chosen&& chosen) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const unsigned lower = (1u << lane) - 1;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const unsigned is_below = __ballot_sync(kFullWarp, keys.exists(j, n) && cut.below(keys.key[j]));
    const unsigned is_equal = __ballot_sync(kFullWarp, keys.exists(j, n) && cut.equal(keys.key[j]));
    if (lane == 0) {
      shared.below[j][warp] = __popc(is_below);
      shared.equal[j][warp] = __popc(is_equal);
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    // Both sums at once: neither exceeds the block's threads.
    const unsigned both = lane < kThreads / kWarpSize ? shared.below[j][lane] | shared.equal[j][lane] << 16 : 0;
    const unsigned earlier = __reduce_add_sync(kFullWarp, lane < warp ? both : 0);
    const unsigned all = __reduce_add_sync(kFullWarp, both);
    const bool is_below = keys.exists(j, n) && cut.below(keys.key[j]);
    const bool is_equal = keys.exists(j, n) && cut.equal(keys.key[j]);
    const Count tie = equal + (earlier >> 16) + __popc(__ballot_sync(kFullWarp, is_equal) & lower);
    const Count slot =
        below + (earlier & 0xffff) + __popc(__ballot_sync(kFullWarp, is_below) & lower) + min(tie, Count(cut.ties));
    if (is_below || (is_equal && tie < Count(cut.ties))) chosen(keys.element(j), slot, keys.key[j]);
    below += all & 0xffff;
    equal += all >> 16;
  }
}

}  // namespace arr_coc
