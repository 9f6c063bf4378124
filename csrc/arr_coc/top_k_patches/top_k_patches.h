#pragma once

#include <tuple>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

class Cuda;

inline void check_k(const char* op, int64_t k, int64_t n) {
  check(0 <= k && k <= n, op, ": k must be in [0, N], got k = ", k, " with N = ", n);
}

// Rows in bytes: row r of sample b starts at base + b * sample_stride + r * row_stride.
struct RowsOf {
  char* base;
  int64_t sample_stride, row_stride;

  C10_HOST_DEVICE char* row(int64_t sample, int64_t row) const {
    return base + sample * sample_stride + row * row_stride;
  }
};

// Returns a tensor whose rows can be copied directly: the elements of a row are adjacent.
inline Tensor with_whole_rows(const Tensor& tensor) {
  return tensor.stride(2) == 1 || tensor.size(2) == 1 ? tensor : torch::stable::contiguous(tensor);
}

inline int64_t row_bytes(const Tensor& tensor) { return tensor.size(2) * int64_t(tensor.element_size()); }

inline RowsOf rows_of(const Tensor& tensor) {
  const int64_t bytes = tensor.element_size();
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), tensor.stride(0) * bytes,
          tensor.stride(1) * bytes};
}

template <class T>
struct TopKPatches {
  const T* scores;
  int64_t* indices;
  RowsOf from, to;
  int64_t row_bytes, batch, n, k;
};

// select_patches calls these two, too; the sources of top_k_patches have them for every T.
template <class T>
void run(const Cuda& device, const TopKPatches<T>& call);

// On the CPU: the indices of each sample's k best scores, best first.
template <class T>
void select_best(const T* scores, int64_t* indices, int64_t batch, int64_t n, int64_t k);

// Row j of a sample of `from` goes to row indices[j] of `to`, whose other rows become 0.
struct TopKPatchesGrad {
  const int64_t* indices;
  RowsOf from, to;
  int64_t row_bytes, batch, n, k;
};

template <class Device>
std::tuple<Tensor, Tensor> top_k_patches(const Tensor& relevance_scores, const Tensor& features, int64_t k) {
  const char* op = "top_k_patches";
  check_rank(op, "relevance_scores", relevance_scores, 2, "[B, N]");
  check_floating(op, "relevance_scores", relevance_scores);
  check_rank(op, "features", features, 3, "[B, N, D]");
  check_floating(op, "features", features);
  check(features.device() == relevance_scores.device(), op, ": features and relevance_scores must be on one device");
  check_same_size(op, "B", "features", features.size(0), "relevance_scores", relevance_scores.size(0));
  check_same_size(op, "N", "features", features.size(1), "relevance_scores", relevance_scores.size(1));
  check_k(op, k, relevance_scores.size(1));
  const Device device(relevance_scores);
  const Tensor scores = as_contiguous(relevance_scores), from = with_whole_rows(features);
  const int64_t batch = scores.size(0), width = features.size(2);
  Tensor selected = allocate(features, {batch, k, width}), indices = allocate(scores, {batch, k}, ScalarType::Long);
  if (indices.numel() == 0) return {selected, indices};
  dispatch_floating(scores.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, TopKPatches<T>{data_of<T>(scores), data_of<int64_t>(indices), rows_of(from), rows_of(selected),
                               row_bytes(features), batch, scores.size(1), k});
  });
  return {selected, indices};
}

// Does not check the values of `indices`, because reading them here would stall the GPU. The CPU kernel refuses an
// index out of range, the CUDA kernel asserts.
template <class Device>
Tensor top_k_patches_grad(const Tensor& grad, const Tensor& indices, int64_t num_patches) {
  const char* op = "top_k_patches_grad";
  check_rank(op, "grad", grad, 3, "[B, k, D]");
  check_floating(op, "grad", grad);
  check_rank(op, "indices", indices, 2, "[B, k]");
  check_dtype(op, "indices", indices, ScalarType::Long);
  check(indices.device() == grad.device(), op, ": indices and grad must be on one device");
  check_same_size(op, "B", "indices", indices.size(0), "grad", grad.size(0));
  check_same_size(op, "k", "indices", indices.size(1), "grad", grad.size(1));
  check(num_patches >= grad.size(1), op, ": num_patches must be at least k, got num_patches = ", num_patches,
        " with k = ", grad.size(1));
  const Device device(grad);
  const Tensor from = with_whole_rows(grad), where = as_contiguous(indices);
  const int64_t batch = grad.size(0), k = grad.size(1), width = grad.size(2);
  Tensor out = allocate(grad, {batch, num_patches, width});
  run(device,
      TopKPatchesGrad{data_of<int64_t>(where), rows_of(from), rows_of(out), row_bytes(grad), batch, num_patches, k});
  return out;
}

}  // namespace arr_coc
