#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/cosine.cuh"
#include "ops/query_alignment/query_alignment.h"

namespace arr_coc {
namespace {

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

template <int Columns, bool Aligned, class T, class A>
__global__ void alignment_kernel(const T* features, const A* units, const bool* mask, T* out, RowGroups groups) {
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
      if (lane == r && r < rows) out[n + r] = T(match[r].token < 0 ? A(0) : (1 + match[r].cosine) / 2);
  }
}

// Null outputs are not needed. `factor` and `chosen` are what column_sums_kernel needs for the query's gradient.
template <int Columns, bool Aligned, class T, class A>
__global__ void alignment_grad_kernel(const T* grad, const T* features, const A* units, const bool* mask, T* out,
                                      A* factor, int64_t* chosen, RowGroups groups) {
  constexpr int kPer = kPerLane<T>;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t width = groups.width;
  for (int64_t item = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; item < groups.total();
       item += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t sample = item / groups.per_sample, base = sample * groups.tokens;
    const int64_t n = sample * groups.count + groups.first_row(item);
    const int rows = groups.rows(item);
    A norm[kRows];
    Match<A> match[kRows];
    best_tokens<Columns, Aligned>(features + n * width, rows, units + base * width, mask ? mask + base : nullptr,
                                  groups.tokens, width, norm, match);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      const int64_t token = match[r].token;
      const A inverse = inverse_norm(norm[r]), scale = A(grad[n + r]) / 2 * inverse;
      const A along = norm_passes(norm[r]) * match[r].cosine * inverse;
      if (factor && lane == 0) {
        factor[n + r] = scale;
        chosen[n + r] = token;
      }
      if (!out) continue;
      const T* row = features + (n + r) * width;
      const A* unit = units + (base + max(token, int64_t(0))) * width;
      for (int64_t at = lane * kPer; at < width; at += kWarpSize * kPer) {
        A x[kPer], u[kPer], result[kPer];
        load<Aligned>(row, at, width, x);
        load<Aligned>(unit, at, width, u);
#pragma unroll
        for (int i = 0; i < kPer; ++i) result[i] = token < 0 ? A(0) : scale * (u[i] - along * x[i]);
        store<Aligned>(out + (n + r) * width, at, width, result);
      }
    }
  }
}

const bool* mask_data(const std::optional<Tensor>& mask) {
  return mask.has_value() ? static_cast<const bool*>(mask->const_data_ptr()) : nullptr;
}

std::optional<Tensor> contiguous_mask(const std::optional<Tensor>& mask) {
  return mask.has_value() ? std::make_optional(torch::stable::contiguous(*mask)) : std::nullopt;
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

Tensor query_alignment_cuda(const Tensor& features, const Tensor& query, const std::optional<Tensor>& mask) {
  check_query_alignment(features, query, mask);
  const CudaScope scope(features);
  const Tensor x = torch::stable::contiguous(features), q = torch::stable::contiguous(query);
  const std::optional<Tensor> kept = contiguous_mask(mask);
  const bool* keep = mask_data(kept);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2), tokens = q.dim() == 3 ? q.size(1) : 1;
  Tensor alignment = torch::stable::new_empty(x, {batch, count});
  if (batch * count == 0) return alignment;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    const Queries<T> queries(q, keep, batch * tokens, width, scope.stream());
    const RowGroups groups{batch, count, tokens, width, (count + kRows - 1) / kRows};
    dispatch_shape(tokens, is_vectorisable(in, width), [&](auto columns, auto aligned) {
      alignment_kernel<columns.value, aligned.value>
          <<<grid_size(batch * groups.per_sample, kCosineWarps), kCosineThreads, 0, scope.stream()>>>(
              in, static_cast<const A*>(queries.unit.const_data_ptr()), keep,
              static_cast<T*>(alignment.mutable_data_ptr()), groups);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return alignment;
}

std::tuple<Tensor, Tensor> query_alignment_grad_cuda(const Tensor& grad, const Tensor& features, const Tensor& query,
                                                     const std::optional<Tensor>& mask, bool need_features,
                                                     bool need_query) {
  check_query_alignment_grad(grad, features, query, mask);
  const CudaScope scope(features);
  const Tensor g = torch::stable::contiguous(grad), x = torch::stable::contiguous(features),
               q = torch::stable::contiguous(query);
  const std::optional<Tensor> kept = contiguous_mask(mask);
  const bool* keep = mask_data(kept);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2), tokens = q.dim() == 3 ? q.size(1) : 1;
  Tensor grad_features =
      need_features ? torch::stable::new_empty(x, {batch, count, width}) : torch::stable::new_empty(x, {0});
  Tensor grad_query = need_query ? torch::stable::new_empty(q, q.sizes()) : torch::stable::new_empty(q, {0});
  if (batch * count == 0) {
    if (need_query && batch > 0) torch::stable::zero_(grad_query);
    return {grad_features, grad_query};
  }
  if (!need_features && !need_query) return {grad_features, grad_query};
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    T* out = static_cast<T*>(grad_features.mutable_data_ptr());
    const Queries<T> queries(q, keep, batch * tokens, width, scope.stream());
    const A* units = static_cast<const A*>(queries.unit.const_data_ptr());
    Tensor factors = torch::stable::new_empty(x, {need_query ? batch * count : 0}, scalar_type_of<A>);
    Tensor choices = torch::stable::new_empty(x, {need_query ? batch * count : 0}, ScalarType::Long);
    A* factor = need_query ? static_cast<A*>(factors.mutable_data_ptr()) : nullptr;
    int64_t* chosen = need_query ? static_cast<int64_t*>(choices.mutable_data_ptr()) : nullptr;
    const RowGroups groups{batch, count, tokens, width, (count + kRows - 1) / kRows};
    const bool vectorisable = is_vectorisable(in, width) && (!need_features || is_vectorisable(out, width));
    dispatch_shape(tokens, vectorisable, [&](auto columns, auto aligned) {
      alignment_grad_kernel<columns.value, aligned.value>
          <<<grid_size(batch * groups.per_sample, kCosineWarps), kCosineThreads, 0, scope.stream()>>>(
              static_cast<const T*>(g.const_data_ptr()), in, units, keep, need_features ? out : nullptr, factor, chosen,
              groups);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
    if (!need_query) return;
    const ColumnCut cut(batch, count, width, tokens);
    Tensor partials = torch::stable::new_empty(x, {cut.partial_size()}, scalar_type_of<A>);
    A* partial = static_cast<A*>(partials.mutable_data_ptr());
    launch_column_sums(in, factor, chosen, partial, cut, scope.stream());
    through_unit_kernel<<<grid_size(batch * tokens, 1), kCosineThreads, 0, scope.stream()>>>(
        partial, cut, units, static_cast<const A*>(queries.norm.const_data_ptr()), keep, A(1),
        static_cast<T*>(grad_query.mutable_data_ptr()));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {grad_features, grad_query};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("query_alignment", TORCH_BOX(&query_alignment_cuda));
  m.impl("query_alignment_grad", TORCH_BOX(&query_alignment_grad_cuda));
}

}  // namespace arr_coc
