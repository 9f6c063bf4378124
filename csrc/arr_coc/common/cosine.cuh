// Cosines of rows with unit vectors on CUDA, and parts of their gradients. common/cosine.h is the same for the CPU.
#pragma once

#include <cstring>

#include "arr_coc/common/cosine_rules.h"
#include "arr_coc/common/vectors.cuh"

namespace arr_coc {

constexpr int kCosineThreads = 256;
constexpr int kCosineWarps = kCosineThreads / kWarpSize;
constexpr int kColumnThreads = 128;

// The rows a warp takes at once, so that it loads each unit vector once for all of them.
constexpr int kRows = 4;

// row[at, at + Count), zeros from `width` on.
template <bool Aligned, int Count, class T, class A>
__device__ __forceinline__ void load(const T* row, int64_t at, int64_t width, A (&out)[Count]) {
  if constexpr (Aligned) {
    constexpr int kPer = kVector<T>;
    static_assert(Count % kPer == 0);
#pragma unroll
    for (int i = 0; i < Count; i += kPer) {
      T values[kPer];
      const uint4 raw = *reinterpret_cast<const uint4*>(row + at + i);
      memcpy(values, &raw, sizeof(raw));
#pragma unroll
      for (int j = 0; j < kPer; ++j) out[i + j] = A(values[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) out[i] = at + i < width ? A(row[at + i]) : A(0);
  }
}

template <bool Aligned, int Count, class T, class A>
__device__ __forceinline__ void store(T* row, int64_t at, int64_t width, const A (&values)[Count]) {
  if constexpr (Aligned) {
    constexpr int kPer = kVector<T>;
    static_assert(Count % kPer == 0);
#pragma unroll
    for (int i = 0; i < Count; i += kPer) {
      T rounded[kPer];
#pragma unroll
      for (int j = 0; j < kPer; ++j) rounded[j] = T(values[i + j]);
      uint4 raw;
      memcpy(&raw, rounded, sizeof(raw));
      *reinterpret_cast<uint4*>(row + at + i) = raw;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i)
      if (at + i < width) row[at + i] = T(values[i]);
  }
}

// One warp computes squared norms of `rows` (1 to kRows) rows from `x` on, and their dot products with `columns` (1 to
// Columns) vectors from `y` on, for every lane. Entries beyond `rows` and `columns` repeat the last.
template <int Columns, bool Aligned, class T, class A>
__device__ __forceinline__ void row_products(const T* x, int rows, const A* y, int columns, int64_t width,
                                             A (&squares)[kRows], A (&products)[kRows][Columns]) {
  constexpr int kPer = kVector<T>;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    squares[r] = 0;
#pragma unroll
    for (int c = 0; c < Columns; ++c) products[r][c] = 0;
  }
  for (int64_t at = lane * kPer; at < width; at += kWarpSize * kPer) {
    A row[kRows][kPer];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      load<Aligned>(x + min(r, rows - 1) * width, at, width, row[r]);
#pragma unroll
      for (int i = 0; i < kPer; ++i) squares[r] += row[r][i] * row[r][i];
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      A column[kPer];
      load<Aligned>(y + min(c, columns - 1) * width, at, width, column);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) products[r][c] += row[r][i] * column[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    squares[r] = warp_sum(squares[r]);
#pragma unroll
    for (int c = 0; c < Columns; ++c) products[r][c] = warp_sum(products[r][c]);
  }
}

// One warp per row computes the row divided by its clamped norm, and the norm. `keep` may be null; a row that is not
// kept becomes zeros, even if it has NaN.
template <class T, class A>
__global__ void unit_rows_kernel(const T* rows, const bool* keep, A* unit, A* norm, int64_t count, int64_t width) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t row = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; row < count;
       row += int64_t(gridDim.x) * kCosineWarps) {
    const bool kept = !keep || keep[row];
    const T* in = rows + row * width;
    A square = 0;
    for (int64_t d = lane; kept && d < width; d += kWarpSize) square += A(in[d]) * A(in[d]);
    const A length = sqrt(warp_sum(square)), inverse = inverse_norm(length);
    for (int64_t d = lane; d < width; d += kWarpSize) unit[row * width + d] = kept ? A(in[d]) * inverse : A(0);
    if (lane == 0) norm[row] = length;
  }
}

// How [B, G, D] column sums of [B, N, D] are cut: partial sums are [B, chunks, G, D].
struct ColumnCut {
  int64_t batch, rows, width, groups, chunk_rows, chunks;

  // Chunks are shorter if there are few rows, so that a single sample fills the device.
  ColumnCut(int64_t batch, int64_t rows, int64_t width, int64_t groups = 1)
      : batch(batch),
        rows(rows),
        width(width),
        groups(groups),
        chunk_rows(groups * std::clamp<int64_t>(rows / 64, 8, kColumnChunk)),
        chunks((rows + chunk_rows - 1) / chunk_rows) {}

  int64_t partial_size() const { return batch * chunks * groups * width; }
};

constexpr int kRowsInFlight = 8;

// Adds factor[n] x[n, at...] to `sum` for `count` rows n (1 to kRowsInFlight), which next() returns one after the
// other. A null factor is 1.
template <bool Aligned, class T, class A, class F>
__device__ __forceinline__ void add_rows(const T* x, const A* factor, int64_t at, int64_t width, int count,
                                         const F& next, A (&sum)[kVector<T>]) {
  T rows[kRowsInFlight][kVector<T>];
  A scale[kRowsInFlight];
#pragma unroll
  for (int r = 0; r < kRowsInFlight; ++r) {
    if (r >= count) continue;
    const int64_t n = next();
    load<Aligned>(x + n * width, at, width, rows[r]);
    scale[r] = factor ? factor[n] : A(1);
  }
#pragma unroll
  for (int r = 0; r < kRowsInFlight; ++r) {
    if (r >= count) continue;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) sum[i] += scale[r] * A(rows[r][i]);
  }
}

// partial[b, k, g, :] = sum over the rows n of chunk k with group[b, n] = g of factor[b, n] x[b, n, :]. A null factor
// is 1, a null group is 0; Plain means that the group is null. A block takes one (b, k, g) and kColumnThreads x
// kVector columns at a time.
template <bool Aligned, bool Plain, class T, class A>
__global__ void column_sums_kernel(const T* x, const A* factor, const int64_t* group, A* partial, ColumnCut cut,
                                   int64_t slabs) {
  constexpr int kPer = kVector<T>;
  for (int64_t item = blockIdx.x; item < cut.batch * cut.chunks * cut.groups * slabs; item += gridDim.x) {
    const int64_t at = (item % slabs * blockDim.x + threadIdx.x) * kPer, which = item / slabs;
    const int64_t g = which % cut.groups, chunk = which / cut.groups % cut.chunks;
    const int64_t first = which / cut.groups / cut.chunks * cut.rows;
    const int64_t begin = first + chunk * cut.chunk_rows, end = min(begin + cut.chunk_rows, first + cut.rows);
    A sum[kPer] = {};
    if constexpr (Plain) {
      if (at >= cut.width) continue;
      for (int64_t n = begin; n < end;) {
        const int count = int(min(int64_t(kRowsInFlight), end - n));
        add_rows<Aligned>(x, factor, at, cut.width, count, [&] { return n++; }, sum);
      }
    } else {
      // Two words of bits, one for each row: whether it is of the group. The warp's lanes look at a row each.
      const auto rows_from = [&](int64_t n) {
        const int lane = threadIdx.x % kWarpSize;
        uint64_t bits = 0;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          const int64_t row = n + word * kWarpSize + lane;
          bits |= uint64_t(__ballot_sync(0xffffffffu, row < end && group[row] == g)) << (word * kWarpSize);
        }
        return bits;
      };
      uint64_t next = rows_from(begin);
      for (int64_t n = begin; n < end; n += 2 * kWarpSize) {
        uint64_t bits = next;
        next = rows_from(n + 2 * kWarpSize);
        while (bits && at < cut.width) {
          const int count = min(kRowsInFlight, __popcll(bits));
          const auto lowest = [&] {
            const int64_t row = n + __ffsll(int64_t(bits)) - 1;
            bits &= bits - 1;
            return row;
          };
          add_rows<Aligned>(x, factor, at, cut.width, count, lowest, sum);
        }
      }
      if (at >= cut.width) continue;
    }
    store<Aligned>(partial + which * cut.width, at, cut.width, sum);
  }
}

// Threads take kVector columns each: as many threads as a row has 16-byte pieces, in whole warps. `cut.rows` must be at
// least 1. `group` and `factor` may be null; `partial` holds cut.partial_size() elements.
template <class T, class A>
void launch_column_sums(const T* x, const A* factor, const int64_t* group, A* partial, const ColumnCut& cut,
                        const Cuda& device) {
  const int64_t pieces = ceil_div(cut.width, kVector<T>);
  const unsigned threads = unsigned(std::min<int64_t>(kColumnThreads, ceil_div(pieces, kWarpSize) * kWarpSize));
  const int64_t slabs = ceil_div(pieces, threads);
  const bool aligned = has_whole_vectors(x, cut.width), plain = !group;
  const auto kernel = aligned
                          ? (plain ? column_sums_kernel<true, true, T, A> : column_sums_kernel<true, false, T, A>)
                          : (plain ? column_sums_kernel<false, true, T, A> : column_sums_kernel<false, false, T, A>);
  device.launch(kernel, {grid_size(cut.batch * cut.chunks * cut.groups * slabs, 1), threads}, x, factor, group, partial,
                cut, slabs);
}

}  // namespace arr_coc
