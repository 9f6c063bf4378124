// Reads rows once: a warp holds a row in registers, 16 bytes per lane and piece, and computes every sum from there.
// Rows of more than kTile elements are processed in tiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "arr_coc/common/cosine.cuh"

namespace arr_coc {

// The 16-byte pieces per lane and the elements per warp. With 16 or 32 floats per lane, there are registers left for as
// many sums.
template <class T>
constexpr int kPieces = sizeof(T) == 2 ? 4 : 8;
template <class T>
constexpr int kTile = kPieces<T> * kVector<T> * kWarpSize;

// The first `size` <= kTile elements from an address on, of which lane l holds kVector at (k kWarpSize + l) kVector
// for each piece k. Aligned: they start on 16 bytes, and `size` is a multiple of kVector.
template <class T>
struct RowTile {
  static constexpr int kPer = kVector<T>;
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

  // The largest number; -inf if there is none. NaN does not count.
  template <bool Aligned, class A>
  __device__ __forceinline__ A most(int size) const {
    A most = -INFINITY;
    if constexpr (Aligned && sizeof(T) == 2) {
      using Pair = std::conditional_t<std::is_same_v<T, Half>, __half2, __nv_bfloat162>;
      constexpr uint32_t kNothing = std::is_same_v<T, Half> ? 0xfc00fc00u : 0xff80ff80u;
      Pair pairs;
      memcpy(&pairs, &kNothing, sizeof(pairs));
#pragma unroll
      for (int k = 0; k < kPieces<T>; ++k) {
        if (at(k) >= size) continue;
        Pair held[4];
        memcpy(held, &raw[k], sizeof(held));
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs = __hmax2(pairs, held[i]);
      }
      most = max(A(pairs.x), A(pairs.y));
    } else {
      for_pieces<Aligned, A>(size, [&](int, const auto& values, int inside) {
#pragma unroll
        for (int i = 0; i < kPer; ++i)
          if (i < inside) most = max(most, values[i]);
      });
    }
    return most;
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

// A row's entropy in one pass, in powers of two: from top = max x and z = (x - top) log2(e) / tau, sum of 2^z and sum
// of 2^z z, H = log2(sum) - weighted / sum. The difference is computed first, because the difference of two large
// products would be too inexact for a power of two. Lanes have their own top until the warp's is known. NaN reaches the
// sums even if the maximum ignores it.
template <class A>
struct OnlineEntropy {
  A top = kLeast<A>, sum = 0, weighted = 0;

  // `scale` is log2(e) / tau; top must have been raised to x.
  __device__ __forceinline__ void add(A x, A scale) {
    const A shifted = (x - top) * scale, weight = power_of_two(shifted);
    sum += weight;
    weighted += weight * max(shifted, A(-1e5));  // 0 * -inf is 0 here: lim p log p
  }

  __device__ __forceinline__ void raise(A higher, A scale) {
    const A down = max((top - higher) * scale, A(-1e5)), factor = power_of_two(down);  // finite: not 0 * -inf
    weighted = (weighted + sum * down) * factor;
    sum *= factor;
    top = higher;
  }

  // In powers of two.
  __device__ __forceinline__ A bits() const { return log2(sum) - weighted / sum; }
};

// The place of element e of a vector in shared memory, chosen so that the lanes of a warp read the pieces of a
// RowTile<T> without bank conflicts.
template <class T, class A>
struct SharedVector {
  static constexpr int kPer = kVector<T>, kWord = 16 / sizeof(A), kWords = kPer / kWord;
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

// The rows that a warp takes side by side, and the lanes that get one row's results.
constexpr int kBatch = 4;
constexpr int kGroup = kWarpSize / kBatch;

// The rows in flight while one is summed, so that the warps keep the memory busy.
template <class T>
constexpr int kAhead = sizeof(T) == 2 ? 2 : 1;

// The results of one read of a row: its entropy, its squared norm and its products with vectors.
template <int Vectors, class A>
struct RowSums {
  OnlineEntropy<A> entropy;
  A square = 0, products[Vectors > 0 ? Vectors : 1] = {};
};

// values[r] combined over the warp to the lanes of group r, in the order of warp_sum.
template <class A, class F>
__device__ __forceinline__ A over_groups(const A (&values)[kBatch], const F& combine) {
  const bool second = threadIdx.x & 16, odd = threadIdx.x & 8;
  A pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    pair[i] = combine(second ? values[2 + i] : values[i],
                      __shfl_xor_sync(0xffffffffu, second ? values[i] : values[2 + i], 16));
  A one = combine(odd ? pair[1] : pair[0], __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[1], 8));
#pragma unroll
  for (int offset = kGroup / 2; offset > 0; offset /= 2) one = combine(one, __shfl_xor_sync(0xffffffffu, one, offset));
  return one;
}

// Combines the lanes' parts of kBatch rows to the results of row r for the lanes of group r.
template <int Vectors, class A>
__device__ __forceinline__ RowSums<Vectors, A> over_warp(RowSums<Vectors, A> (&parts)[kBatch], A scale) {
  const auto add = [](A a, A b) { return a + b; };
  const auto gather = [&](const auto& of) {
    A values[kBatch];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) values[r] = of(parts[r]);
    return over_groups(values, add);
  };
  A tops[kBatch];
#pragma unroll
  for (int r = 0; r < kBatch; ++r) tops[r] = parts[r].entropy.top;
  RowSums<Vectors, A> whole;
  whole.entropy.top = over_groups(tops, [](A a, A b) { return max(a, b); });
#pragma unroll
  for (int r = 0; r < kBatch; ++r)
    parts[r].entropy.raise(__shfl_sync(0xffffffffu, whole.entropy.top, r * kGroup), scale);
  whole.entropy.sum = gather([](const auto& part) { return part.entropy.sum; });
  whole.entropy.weighted = gather([](const auto& part) { return part.entropy.weighted; });
  whole.square = gather([](const auto& part) { return part.square; });
#pragma unroll
  for (int v = 0; v < Vectors; ++v) whole.products[v] = gather([&](const auto& part) { return part.products[v]; });
  return whole;
}

template <bool Aligned, int Vectors, class T, class A>
__device__ __forceinline__ void add_tile(const RowTile<T>& tile, int64_t start, int size, A scale,
                                         const SharedVector<T, A>* vectors, RowSums<Vectors, A>& sums) {
  sums.entropy.raise(max(sums.entropy.top, tile.template most<Aligned, A>(size)), scale);
  tile.template for_pieces<Aligned, A>(size, [&](int k, const auto& values, int inside) {
    A others[Vectors > 0 ? Vectors : 1][kVector<T>];
#pragma unroll
    for (int v = 0; v < Vectors; ++v) vectors[v].load(start, k, others[v]);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (i >= inside) continue;
      sums.entropy.add(values[i], scale);
      sums.square += values[i] * values[i];
#pragma unroll
      for (int v = 0; v < Vectors; ++v) sums.products[v] += values[i] * others[v][i];
    }
  });
}

// One warp reads `rows` rows from `first` on in batches and calls f(r, rows, sums) for the batch from row r on; lanes
// of group g get row r + g. Wide: rows may be longer than a tile; otherwise the next row is loaded while one is summed.
// `ready` is called when the first row has arrived.
template <bool Wide, bool Aligned, int Vectors, class T, class A, class Ready, class F>
__device__ __forceinline__ void scan_rows(const T* first, int rows, int batch, int64_t width, A scale,
                                          const SharedVector<T, A>* vectors, const Ready& ready, const F& f) {
  if constexpr (Wide) {
    ready();
    for (int from = 0; from < rows; from += batch) {
      const int count = min(batch, rows - from);
      RowSums<Vectors, A> parts[kBatch];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (r >= count) break;
        for (int64_t start = 0; start < width; start += kTile<T>) {
          const int size = RowTile<T>::size(start, width);
          RowTile<T> tile;
          tile.template load<Aligned>(first + (from + r) * width + start, size);
          add_tile<Aligned>(tile, start, size, scale, vectors, parts[r]);
        }
      }
      f(from, count, over_warp(parts, scale));
    }
  } else {
    const int size = int(width);
    RowTile<T> tiles[kAhead<T> + 1];
#pragma unroll
    for (int r = 0; r < kAhead<T>; ++r)
      if (r < rows) tiles[r].template load<Aligned>(first + r * width, size);
    ready();
    for (int from = 0; from < rows; from += batch) {
      const int count = min(batch, rows - from);
      RowSums<Vectors, A> parts[kBatch];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (r >= count) break;
        const int ahead = from + r + kAhead<T>;
        if (ahead < rows) tiles[kAhead<T>].template load<Aligned>(first + ahead * width, size);
        add_tile<Aligned>(tiles[0], 0, size, scale, vectors, parts[r]);
#pragma unroll
        for (int a = 0; a < kAhead<T>; ++a) tiles[a] = tiles[a + 1];
      }
      f(from, count, over_warp(parts, scale));
    }
  }
}

// The rows a warp takes one after the other; more if there are enough for every warp of a large device.
inline int rows_per_warp(int64_t rows) {
  constexpr int64_t kDeviceWarps = 132 * 16;
  int per_warp = 1;
  while (per_warp < 8 && per_warp * 2 * kDeviceWarps <= rows) per_warp *= 2;
  return rows >= 16 * 4 * kDeviceWarps ? 16 : per_warp;
}

}  // namespace arr_coc
