#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/alignment.cuh"
#include "common/column_units.cuh"
#include "ops/query_alignment/query_alignment.h"

namespace arr_coc {
namespace {

// Null outputs are not computed. column_sums_kernel needs `factor` and `chosen` for the query's gradient.
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
    const Queries<T> queries(q, keep, batch * tokens, width, scope.stream());
    launch_alignment(static_cast<const T*>(x.const_data_ptr()), queries.units(), keep,
                     static_cast<T*>(alignment.mutable_data_ptr()), batch, count, tokens, width, scope.stream());
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
    const A* units = queries.units();
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
    launch_through_unit(partial, cut, units, static_cast<const A*>(queries.norm.const_data_ptr()), keep, A(1),
                        static_cast<T*>(grad_query.mutable_data_ptr()), scope.stream());
  });
  return {grad_features, grad_query};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("query_alignment", TORCH_BOX(&query_alignment_cuda));
  m.impl("query_alignment_grad", TORCH_BOX(&query_alignment_grad_cuda));
}

}  // namespace arr_coc
