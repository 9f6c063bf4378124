// How well rows fit the best of a sample's query tokens, on CUDA.
#pragma once

#include "common/cosine.cuh"

namespace arr_coc {

// See query_alignment.cpp for the formulas and for which token wins.
template <class A>
struct Match {
  int64_t token = -1;
  A cosine = 0;

  __device__ void offer(int64_t candidate, A value) {
    if (token < 0 || value > cosine || (value != value && cosine == cosine)) token = candidate, cosine = value;
  }
};

// One warp: for each of `rows` rows its norm and best token.
template <int Columns, bool Aligned, class T, class A>
__device__ __forceinline__ void best_tokens(const T* x, int rows, const A* units, const bool* mask, int64_t tokens,
                                            int64_t width, A (&norm)[kRows], Match<A> (&match)[kRows]) {
  for (int64_t first = 0; first < tokens; first += Columns) {
    A squares[kRows], products[kRows][Columns];
    row_products<Columns, Aligned>(x, rows, units + first * width, int(min(int64_t(Columns), tokens - first)), width,
                                   squares, products);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      norm[r] = sqrt(squares[r]);
      const A inverse = inverse_norm(norm[r]);
#pragma unroll
      for (int c = 0; c < Columns; ++c)
        if (first + c < tokens && (!mask || mask[first + c])) match[r].offer(first + c, products[r][c] * inverse);
    }
  }
}

// A warp takes kRows rows of one sample.
struct RowGroups {
  int64_t batch, count, tokens, width, per_sample;

  __device__ int64_t total() const { return batch * per_sample; }
  __device__ int64_t first_row(int64_t item) const { return item % per_sample * kRows; }
  __device__ int rows(int64_t item) const { return int(min(int64_t(kRows), count - first_row(item))); }
};

template <int Columns, bool Aligned, class T, class A, class O>
__global__ void alignment_kernel(const T* features, const A* units, const bool* mask, O* out, RowGroups groups) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t item = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; item < groups.total();
       item += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t sample = item / groups.per_sample, base = sample * groups.tokens;
    const int64_t n = sample * groups.count + groups.first_row(item);
    const int rows = groups.rows(item);
    A norm[kRows];
    Match<A> match[kRows];
    best_tokens<Columns, Aligned>(features + n * groups.width, rows, units + base * groups.width,
                                  mask ? mask + base : nullptr, groups.tokens, groups.width, norm, match);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (lane == r && r < rows) out[n + r] = O(match[r].token < 0 ? A(0) : (1 + match[r].cosine) / 2);
  }
}

// Calls f(columns, aligned): tokens a warp takes at once, and whether rows are read 16 bytes at a time, as types.
template <class F>
void dispatch_shape(int64_t tokens, bool aligned, const F& f) {
  using One = std::integral_constant<int, 1>;
  using Eight = std::integral_constant<int, 8>;
  if (tokens == 1) return aligned ? f(One{}, std::true_type{}) : f(One{}, std::false_type{});
  return aligned ? f(Eight{}, std::true_type{}) : f(Eight{}, std::false_type{});
}

// The query's unit vectors and norms, in the dtype that is computed in.
template <class T>
struct Queries {
  using A = accumulate_t<T>;
  Tensor unit, norm;

  Queries(const Tensor& query, const bool* keep, int64_t rows, int64_t width, cudaStream_t stream)
      : unit(torch::stable::new_empty(query, {rows, width}, scalar_type_of<A>)),
        norm(torch::stable::new_empty(query, {rows}, scalar_type_of<A>)) {
    unit_rows_kernel<<<grid_size(rows, kCosineWarps), kCosineThreads, 0, stream>>>(
        static_cast<const T*>(query.const_data_ptr()), keep, static_cast<A*>(unit.mutable_data_ptr()),
        static_cast<A*>(norm.mutable_data_ptr()), rows, width);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

// [B, N] of what rows [B, N, D] and `queries` of [B, T, D] give; in O, which need not be T.
template <class T, class O>
void launch_alignment(const T* features, const Queries<T>& queries, const bool* keep, O* out, int64_t batch,
                      int64_t count, int64_t tokens, int64_t width, cudaStream_t stream) {
  using A = accumulate_t<T>;
  const RowGroups groups{batch, count, tokens, width, (count + kRows - 1) / kRows};
  dispatch_shape(tokens, is_vectorisable(features, width), [&](auto columns, auto aligned) {
    alignment_kernel<columns.value, aligned.value>
        <<<grid_size(batch * groups.per_sample, kCosineWarps), kCosineThreads, 0, stream>>>(
            features, static_cast<const A*>(queries.unit.const_data_ptr()), keep, out, groups);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace arr_coc
