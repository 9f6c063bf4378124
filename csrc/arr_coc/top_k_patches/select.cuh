// Helpers of the kernels of top_k_patches for selecting and copying. A key's digits are counted as in
// common/radix_select.cuh; here a block holds its keys in registers, or has a part of one sample's keys.
#pragma once

#include "arr_coc/common/ordered_key.h"
#include "arr_coc/common/radix_select.cuh"
#include "arr_coc/top_k_patches/top_k_patches.h"

namespace arr_coc {

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

// One warp writes f(unit) for each unit of a row: kFlight calls of `read` before the first store.
template <class Unit, int kFlight, class Read, class F>
__device__ __forceinline__ void map_row_as(const char* from, char* to, int64_t bytes, const Read& read, const F& f) {
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  const int64_t units = bytes / int64_t(sizeof(Unit));
  for (int64_t first = threadIdx.x % kWarpSize; first < units; first += kFlight * kWarpSize) {
    Unit values[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i)
      if (first + i * kWarpSize < units) values[i] = read(source + first + i * kWarpSize);
#pragma unroll
    for (int i = 0; i < kFlight; ++i)
      if (first + i * kWarpSize < units) target[first + i * kWarpSize] = f(values[i]);
  }
}

template <class Unit, int kFlight>
__device__ __forceinline__ void copy_row_as(const char* from, char* to, int64_t bytes) {
  map_row_as<Unit, kFlight>(
      from, to, bytes, [](const Unit* unit) { return __ldg(unit); }, [](Unit unit) { return unit; });
}

// kUnit is 16, or 0 where the width is known only here.
template <int kUnit>
__device__ __forceinline__ void copy_row(const char* from, char* to, int64_t bytes, int unit) {
  if (kUnit == 16) return copy_row_as<uint4, 8>(from, to, bytes);
  if (unit == 8) return copy_row_as<uint2, 4>(from, to, bytes);
  if (unit == 4) return copy_row_as<unsigned, 4>(from, to, bytes);
  copy_row_as<unsigned short, 4>(from, to, bytes);
}

// Rows to copy from one tensor to another. Wide rows are copied in segments.
struct RowCopy {
  RowsOf from, to;
  int64_t bytes;    // of a row
  int64_t segment;  // bytes of a segment
  unsigned segments;
  int unit;  // the widest that divides every row's address and length
};

inline RowCopy row_copy(const RowsOf& from, const RowsOf& to, int64_t bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(from.base) | reinterpret_cast<uintptr_t>(to.base) |
                        uint64_t(from.sample_stride | from.row_stride | to.sample_stride | to.row_stride | bytes);
  const int64_t segments = std::clamp<int64_t>(bytes / 8192, 1, 1024);
  const int64_t segment = ceil_div(ceil_div(bytes, segments), 16) * 16;
  return {
      from, to, bytes, segment, unsigned(segments), bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 2};
}

// Calls f with the unit as a constant.
template <class F>
auto with_unit(const RowCopy& rows, const F& f) {
  return rows.unit == 16 ? f(std::integral_constant<int, 16>{}) : f(std::integral_constant<int, 0>{});
}

}  // namespace arr_coc
