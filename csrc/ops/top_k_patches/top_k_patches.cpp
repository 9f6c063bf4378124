#include "ops/top_k_patches/top_k_patches.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "common/cpu.h"
#include "common/ordered_key.h"

namespace arr_coc {
namespace {

// Indices are unique, so this order is strict: an unstable selection has one result.
template <class Key>
struct Ranked {
  Key key;
  int64_t index;
  bool operator<(const Ranked& other) const { return key != other.key ? key < other.key : index < other.index; }
};

template <class T>
void select_row(const T* scores, int64_t n, int64_t k, std::vector<Ranked<ordered_key_t<T>>>& ranked, int64_t* out) {
  ranked.resize(n);
  for (int64_t i = 0; i < n; ++i) ranked[i] = {descending_key(scores[i]), i};
  if (k < n) std::nth_element(ranked.begin(), ranked.begin() + k, ranked.end());
  std::sort(ranked.begin(), ranked.begin() + k);
  for (int64_t j = 0; j < k; ++j) out[j] = ranked[j].index;
}

std::tuple<Tensor, Tensor> top_k_patches_cpu(const Tensor& relevance_scores, const Tensor& features, int64_t k) {
  check_top_k_patches(relevance_scores, features, k);
  const Tensor scores = as_contiguous(relevance_scores), from = with_whole_rows(features);
  const int64_t batch = scores.size(0), n = scores.size(1), width = features.size(2);
  Tensor selected = torch::stable::new_empty(features, {batch, k, width});
  Tensor indices = torch::stable::new_empty(scores, {batch, k}, ScalarType::Long);
  if (batch * k == 0) return {selected, indices};
  int64_t* chosen = static_cast<int64_t*>(indices.mutable_data_ptr());
  dispatch_floating(scores.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* in = static_cast<const T*>(scores.const_data_ptr());
    parallel_rows(batch, n * 8, [&](int64_t begin, int64_t end) {
      std::vector<Ranked<ordered_key_t<T>>> ranked;
      for (int64_t b = begin; b < end; ++b) select_row(in + b * n, n, k, ranked, chosen + b * k);
    });
  });
  const RowsOf rows = rows_of(from);
  const int64_t bytes = width * features.element_size();
  char* out = static_cast<char*>(selected.mutable_data_ptr());
  parallel_rows(bytes ? batch * k : 0, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(out + row * bytes, rows.base + row / k * rows.sample_stride + chosen[row] * rows.row_stride, bytes);
  });
  return {selected, indices};
}

Tensor top_k_patches_grad_cpu(const Tensor& grad, const Tensor& indices, int64_t num_patches) {
  check_top_k_patches_grad(grad, indices, num_patches);
  const Tensor from = with_whole_rows(grad), where = as_contiguous(indices);
  const int64_t batch = grad.size(0), k = grad.size(1), width = grad.size(2);
  const int64_t* index = static_cast<const int64_t*>(where.const_data_ptr());
  for (int64_t row = 0; row < batch * k; ++row)
    check(0 <= index[row] && index[row] < num_patches, "top_k_patches_grad: indices must be in [0, ", num_patches,
          "), got ", index[row]);
  Tensor grad_features = torch::stable::new_zeros(grad, {batch, num_patches, width});
  const RowsOf rows = rows_of(from);
  const int64_t bytes = width * grad.element_size();
  char* out = static_cast<char*>(grad_features.mutable_data_ptr());
  parallel_rows(bytes ? batch * k : 0, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / k;
      std::memcpy(out + (b * num_patches + index[row]) * bytes,
                  rows.base + b * rows.sample_stride + row % k * rows.row_stride, bytes);
    }
  });
  return grad_features;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "top_k_patches(Tensor relevance_scores, Tensor features, SymInt k) -> "
      "(Tensor selected_features, Tensor selected_indices)");
  m.def("top_k_patches_grad(Tensor grad, Tensor indices, SymInt num_patches) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("top_k_patches", TORCH_BOX(&top_k_patches_cpu));
  m.impl("top_k_patches_grad", TORCH_BOX(&top_k_patches_grad_cpu));
}

}  // namespace arr_coc
