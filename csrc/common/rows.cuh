// Rows read once: a warp holds a row in registers, 16 bytes a lane and piece, and every sum over it is taken from
// there. Rows of more than kTile elements are taken tile by tile.
#pragma once

#include <cfloat>

#include "common/cosine.cuh"

namespace arr_coc {

// Pieces of 16 bytes that a lane holds, and the elements a warp then has: the registers of 16 or 32 floats a lane leave
// room for as many sums.
template <class T>
constexpr int kPieces = sizeof(T) == 2 ? 4 : 8;
template <class T>
constexpr int kTile = kPieces<T> * kPerLane<T> * kWarpSize;

// The first `size` <= kTile elements from an address on, of which lane l holds kPerLane at (k kWarpSize + l) kPerLane
// for each piece k. Aligned: they start on 16 bytes, and `size` is a multiple of kPerLane.
template <class T>
struct RowTile {
  static constexpr int kPer = kPerLane<T>;
  uint4 raw[kPieces<T>];

  static __device__ __forceinline__ int at(int piece) {
    return (piece * kWarpSize + int(threadIdx.x % kWarpSize)) * kPer;
  }

  // How much of a row of `width` is in the tile that starts at `start`.
  static __device__ __forceinline__ int size(int64_t start, int64_t width) {
    return int(min(width - start, int64_t(kTile<T>)));
  }

  template <bool Aligned>
  __device__ __forceinline__ void load(const T* from, int size) {
#pragma unroll
    for (int k = 0; k < kPieces<T>; ++k) {
      if constexpr (Aligned) {
        if (at(k) < size) raw[k] = __ldcs(reinterpret_cast<const uint4*>(from + at(k)));
      } else {
        T values[kPer];
#pragma unroll
        for (int i = 0; i < kPer; ++i) values[i] = at(k) + i < size ? from[at(k) + i] : T(0);
        memcpy(&raw[k], values, sizeof(raw[k]));
      }
    }
  }

  // Calls f(k, values, inside) for each piece k with an element, of whose values the first `inside` are some.
  template <bool Aligned, class A, class F>
  __device__ __forceinline__ void for_pieces(int size, const F& f) const {
#pragma unroll
    for (int k = 0; k < kPieces<T>; ++k) {
      if (at(k) >= size) continue;
      T stored[kPer];
      memcpy(stored, &raw[k], sizeof(raw[k]));
      A values[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) values[i] = A(stored[i]);
      f(k, values, Aligned ? kPer : min(kPer, size - at(k)));
    }
  }
};

constexpr double kLog2E = 1.4426950408889634;

// 2^x. The hardware's is good to 2 units in the last place, which is below what rounding x itself costs.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }

template <class A>
constexpr A kLeast = std::is_same_v<A, double> ? A(-DBL_MAX) : A(-FLT_MAX);

// A row's entropy in one pass, with z = x / tau in powers of two: from top = max z, sum of 2^(z - top) and sum of
// 2^(z - top) (z - top), H = log2(sum) - weighted / sum. Each lane keeps its own top until `over_warp`. NaN shows in
// the sums whatever the maximum makes of it.
template <class A>
struct OnlineEntropy {
  A top = kLeast<A>, sum = 0, weighted = 0;

  // Before the first `add` of a tile. `scale` is log2(e) / tau.
  template <bool Aligned, class T>
  __device__ __forceinline__ void prepare(const RowTile<T>& tile, int size, A scale) {
    A most = -INFINITY;
    tile.template for_pieces<Aligned, A>(size, [&](int, const auto& values, int inside) {
#pragma unroll
      for (int i = 0; i < RowTile<T>::kPer; ++i)
        if (i < inside) most = max(most, values[i]);
    });
    raise(max(top, most * scale));
  }

  __device__ __forceinline__ void add(A x, A scale) {
    const A shifted = x * scale - top, weight = power_of_two(shifted);
    sum += weight;
    weighted += weight * max(shifted, A(-1e5));  // 0 * -inf is 0 here: lim p log p
  }

  __device__ __forceinline__ void over_warp() {
    A most = top;
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
      most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
    raise(most);
    sum = warp_sum(sum);
    weighted = warp_sum(weighted);
  }

  // After over_warp, in powers of two.
  __device__ __forceinline__ A bits() const { return log2(sum) - weighted / sum; }

 private:
  __device__ __forceinline__ void raise(A higher) {
    const A down = top - higher, factor = power_of_two(down);
    weighted = sum == 0 ? A(0) : (weighted + sum * down) * factor;  // not 0 * -inf
    sum = sum == 0 ? A(0) : sum * factor;
    top = higher;
  }
};

// Where a vector in shared memory keeps element e, so that the lanes of a warp read the pieces of a RowTile<T> of it
// without bank conflicts.
template <class T, class A>
struct SharedVector {
  static constexpr int kPer = kPerLane<T>, kWord = 16 / sizeof(A), kWords = kPer / kWord;
  A* data;

  // Elements of memory for a vector of `width`.
  static __host__ __device__ int64_t size(int64_t width) {
    constexpr int64_t kWhole = kPer * kWarpSize;
    return (width + kWhole - 1) / kWhole * kWhole;
  }

  __device__ __forceinline__ A& operator[](int64_t e) const {
    const int64_t piece = e / kPer;
    const int word = int(e % kPer) / kWord;
    return data[((piece / kWarpSize * kWords + word) * kWarpSize + piece % kWarpSize) * kWord + e % kWord];
  }

  // The calling lane's piece k of the tile from `start` on.
  __device__ __forceinline__ void load(int64_t start, int k, A (&values)[kPer]) const {
    const A* from = data + start + (k * kWords * kWarpSize + threadIdx.x % kWarpSize) * kWord;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint4 raw = *reinterpret_cast<const uint4*>(from + word * kWarpSize * kWord);
      memcpy(values + word * kWord, &raw, sizeof(raw));
    }
  }

  // The calling lane's piece k of the tile from `start` on.
  __device__ __forceinline__ void store(int64_t start, int k, const A (&values)[kPer]) const {
    A* to = data + start + (k * kWords * kWarpSize + threadIdx.x % kWarpSize) * kWord;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint4 raw;
      memcpy(&raw, values + word * kWord, sizeof(raw));
      *reinterpret_cast<uint4*>(to + word * kWarpSize * kWord) = raw;
    }
  }
};

}  // namespace arr_coc
