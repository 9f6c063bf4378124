#include <torch/csrc/stable/library.h>

#include "arr_coc/common/alignment.cuh"
#include "arr_coc/common/column_units.cuh"
#include "arr_coc/query_alignment/one_token_gradient.cuh"
#include "arr_coc/query_alignment/query_alignment.h"

namespace arr_coc {
namespace {

// Null outputs are not computed. column_sums_kernel needs `factor` and `chosen` for the query's gradient.
template <int Columns, bool Aligned, class T, class A>
__global__ void alignment_grad_kernel(const T* grad, const T* features, const A* units, const bool* mask, T* out,
                                      A* factor, int64_t* chosen, RowGroups groups) {
  constexpr int kPer = kVector<T>;
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

}  // namespace

template <class T>
void run(const Cuda& device, const QueryAlignment<T>& call) {
  const auto [features, query, mask, out, batch, count, width, tokens] = call;
  Queries<T> queries(device, query, mask, batch * tokens, width);
  launch_alignment(features, queries.unit.data(), mask, out, batch, count, tokens, width, device);
}

template <class T>
void run(const Cuda& device, const QueryAlignmentGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t batch = call.batch, count = call.count, width = call.width, tokens = call.tokens;
  if (batch * count == 0) {
    const size_t bytes = call.grad_query ? batch * tokens * width * sizeof(T) : 0;
    if (bytes > 0) STD_CUDA_CHECK(cudaMemsetAsync(call.grad_query, 0, bytes, device.stream()));
    return;
  }
  if constexpr (!std::is_same_v<T, double>) {
    if (one_token::takes(call)) return one_token::run(device, call);
  }
  Queries<T> queries(device, call.query, call.mask, batch * tokens, width);
  Scratch<A> factor(device, call.grad_query ? batch * count : 0);
  Scratch<int64_t> chosen(device, call.grad_query ? batch * count : 0);
  const RowGroups groups{batch, count, tokens, width, (count + kRows - 1) / kRows};
  // A null output counts as aligned.
  const bool aligned = has_whole_vectors(call.features, width) && has_whole_vectors(call.grad_features, width);
  const auto kernel = tokens == 1
                          ? (aligned ? alignment_grad_kernel<1, true, T, A> : alignment_grad_kernel<1, false, T, A>)
                          : (aligned ? alignment_grad_kernel<8, true, T, A> : alignment_grad_kernel<8, false, T, A>);
  device.launch(kernel, {grid_size(batch * groups.per_sample, kCosineWarps), kCosineThreads}, call.grad, call.features,
                queries.unit.data(), call.mask, call.grad_features, factor.data(), chosen.data(), groups);
  if (!call.grad_query) return;
  const ColumnCut cut(batch, count, width, tokens);
  Scratch<A> partial(device, cut.partial_size());
  launch_column_sums<T, A>(call.features, factor.data(), chosen.data(), partial.data(), cut, device);
  launch_through_unit<A>(partial.data(), cut, queries.unit.data(), queries.norm.data(), call.mask, A(1),
                         call.grad_query, device);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("query_alignment", TORCH_BOX(&query_alignment<Cuda>));
  m.impl("query_alignment_grad", TORCH_BOX(&query_alignment_grad<Cuda>));
}

}  // namespace arr_coc
