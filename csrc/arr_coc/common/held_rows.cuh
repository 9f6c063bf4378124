// Operators over the rows of a tensor on CUDA: a warp or a block holds a row in registers, so that memory is read once.
#pragma once

#include <cstring>
#include <type_traits>

#include "arr_coc/common/vectors.cuh"

namespace arr_coc {

// The warps of a block in which each warp has its own rows.
constexpr int kRowWarps = 4;

// The most threads of a block that shares one row, so that each may use 128 registers.
constexpr int kRowThreads = 512;

// The most vectors of a row that a thread holds.
constexpr int kMostVectors = 4;

// Stops the compiler from keeping a packed vector in unpacked form, which would take twice the registers.
__device__ __forceinline__ void keep_packed(uint4& raw) {
  asm volatile("" : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w));
}

// Writes values to row[at, at + Count), limited by `width`. kAligned: either all of them are written, in one access, or
// none.
template <bool kAligned, class O, int kCount>
__device__ __forceinline__ void store_values(O* row, int64_t at, int64_t width, const O (&values)[kCount]) {
  if constexpr (kAligned) {
    if (at >= width) return;
    Pack<O, kCount> whole;
    memcpy(&whole, values, sizeof(whole));
    *reinterpret_cast<Pack<O, kCount>*>(row + at) = whole;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (at + i < width) row[at + i] = values[i];
  }
}

// The threads that share a row: a warp or the whole block.
template <bool kBlock>
struct RowGroup {
  __device__ RowGroup()
      : lane(kBlock ? threadIdx.x : threadIdx.x % kWarpSize),
        size(kBlock ? blockDim.x : kWarpSize),
        first(kBlock ? blockIdx.x : int64_t(blockIdx.x) * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize),
        stride(kBlock ? gridDim.x : int64_t(gridDim.x) * (blockDim.x / kWarpSize)) {}

  // The start of the lane's vector number `i` in the row.
  template <class T>
  __device__ int at(int i) const {
    return (i * size + lane) * kVector<T>;
  }

  // Combines every value over the group in a fixed order, for all its lanes. Consecutive calls must pass different
  // `shared` with one entry per warp, because a warp may be one call ahead of another, but not two.
  template <int kCount, class A, class F>
  __device__ void combine(A (&values)[kCount], A (*shared)[kCount], A neutral, const F& f) const {
    over_warp(values, f);
    if constexpr (kBlock) {
      const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize, slot = threadIdx.x % kWarpSize;
      if (warps == 1) return;
      if (slot == 0) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) shared[warp][c] = values[c];
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kCount; ++c) values[c] = slot < warps ? shared[slot][c] : neutral;
      over_warp(values, f);
    }
  }

  int lane, size;
  int64_t first, stride;

 private:
  template <int kCount, class A, class F>
  __device__ static void over_warp(A (&values)[kCount], const F& f) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) values[c] = f(c, values[c], __shfl_xor_sync(0xffffffffu, values[c], offset));
    }
  }
};

// Calls f(vectors, is_block, threads) with the fewest threads that hold a row of `width` elements: `vectors` each, both
// constants. Returns false if `most_threads` are not enough.
template <class T, class F>
bool for_held_rows(int64_t width, int64_t most_threads, const F& f) {
  const int64_t vectors = ceil_div(width, kVector<T>), of_lane = ceil_div(vectors, kWarpSize);
  const std::true_type block;
  const auto in_warp = [&](auto count) { return f(count, std::false_type(), unsigned(kRowWarps * kWarpSize)), true; };
  if (of_lane == 1) return in_warp(Constant<1>());
  if (of_lane == 2) return in_warp(Constant<2>());
  if (of_lane == 3) return in_warp(Constant<3>());
  if (of_lane == 4) return in_warp(Constant<4>());
  const int64_t warps = (vectors + kMostVectors * kWarpSize - 1) / (kMostVectors * kWarpSize);
  const unsigned threads = unsigned(std::min(warps * kWarpSize, most_threads));
  if (vectors > kMostVectors * most_threads) return false;
  if (vectors <= 3 * warps * kWarpSize) return f(Constant<3>(), block, threads), true;
  return f(Constant<4>(), block, threads), true;
}

}  // namespace arr_coc
