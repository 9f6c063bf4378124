#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>

#include "common/checks.h"

namespace arr_coc {

inline const bool* mask_data(const std::optional<Tensor>& mask) {
  return mask.has_value() ? static_cast<const bool*>(mask->const_data_ptr()) : nullptr;
}

inline std::optional<Tensor> contiguous_mask(const std::optional<Tensor>& mask) {
  return mask.has_value() ? std::make_optional(torch::stable::contiguous(*mask)) : std::nullopt;
}

inline void check_query_alignment(const Tensor& features, const Tensor& query, const std::optional<Tensor>& mask) {
  const char* op = "query_alignment";
  check_rank(op, "features", features, 3, "[B, N, D]");
  check_floating(op, "features", features);
  check(features.size(2) > 0, op, ": features must have D >= 1, got shape ", shape_of(features));
  check(query.dim() == 2 || query.dim() == 3, op, ": query must be [B, D] or [B, T, D], got shape ", shape_of(query));
  check_alike(op, "features", features, "query", query);
  check_same_size(op, "B", "query", query.size(0), "features", features.size(0));
  check_same_size(op, "D", "query", query.size(-1), "features", features.size(2));
  if (query.dim() == 3) check(query.size(1) > 0, op, ": query must have T >= 1, got shape ", shape_of(query));
  if (!mask.has_value()) return;
  check(query.dim() == 3, op, ": mask needs a query [B, T, D], got query of shape ", shape_of(query));
  check_rank(op, "mask", *mask, 2, "[B, T]");
  check_dtype(op, "mask", *mask, ScalarType::Bool);
  check(mask->device() == features.device(), op, ": mask and features must be on one device");
  check_same_size(op, "B", "mask", mask->size(0), "query", query.size(0));
  check_same_size(op, "T", "mask", mask->size(1), "query", query.size(1));
}

inline void check_query_alignment_grad(const Tensor& grad, const Tensor& features, const Tensor& query,
                                       const std::optional<Tensor>& mask) {
  const char* op = "query_alignment_grad";
  check_query_alignment(features, query, mask);
  check_rank(op, "grad", grad, 2, "[B, N]");
  check_alike(op, "features", features, "grad", grad);
  check_same_size(op, "B", "grad", grad.size(0), "features", features.size(0));
  check_same_size(op, "N", "grad", grad.size(1), "features", features.size(1));
}

}  // namespace arr_coc
