#pragma once

#include <torch/csrc/stable/ops.h>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/contiguous.h"

namespace arr_coc {

inline void check_top_k_patches(const Tensor& scores, const Tensor& features, int64_t k) {
  const char* op = "top_k_patches";
  check_rank(op, "relevance_scores", scores, 2, "[B, N]");
  check_floating(op, "relevance_scores", scores);
  check_rank(op, "features", features, 3, "[B, N, D]");
  check_floating(op, "features", features);
  check(features.device() == scores.device(), op, ": features and relevance_scores must be on one device");
  check_same_size(op, "B", "features", features.size(0), "relevance_scores", scores.size(0));
  check_same_size(op, "N", "features", features.size(1), "relevance_scores", scores.size(1));
  check(0 <= k && k <= scores.size(1), op, ": k must be in [0, N], got k = ", k, " with N = ", scores.size(1));
}

// Does not check the values of `indices`, because reading them here would stall the GPU. The CPU kernel refuses an
// index out of range, the CUDA kernel asserts.
inline void check_top_k_patches_grad(const Tensor& grad, const Tensor& indices, int64_t num_patches) {
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
}

// Rows in bytes: row r of sample b starts at base + b * sample_stride + r * row_stride.
struct RowsOf {
  char* base;
  int64_t sample_stride, row_stride;
};

// Returns a tensor whose rows can be copied directly: the elements of a row are adjacent.
inline Tensor with_whole_rows(const Tensor& tensor) {
  return tensor.stride(2) == 1 || tensor.size(2) == 1 ? tensor : torch::stable::contiguous(tensor);
}

inline RowsOf rows_of(const Tensor& tensor) {
  const int64_t bytes = tensor.element_size();
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), tensor.stride(0) * bytes,
          tensor.stride(1) * bytes};
}

}  // namespace arr_coc
