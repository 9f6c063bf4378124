#pragma once

#include "common/checks.h"

namespace arr_coc {

// Whether `tensor` has exactly the sizes of the first `rank` dimensions of `x`.
inline bool has_sizes(const Tensor& tensor, const Tensor& x, int64_t rank) {
  bool same = tensor.dim() == rank;
  for (int64_t dim = 0; same && dim < rank; ++dim) same = tensor.size(dim) == x.size(dim);
  return same;
}

inline void check_layer_norm_rows(const char* op, const Tensor& x, const Tensor& weight) {
  check_floating(op, "x", x);
  check(x.dim() >= 1 && x.size(-1) >= 1, op, ": x must be [..., D] with D >= 1, got shape ", shape_of(x));
  check_rank(op, "weight", weight, 1, "[D]");
  check_alike(op, "x", x, "weight", weight);
  check_same_size(op, "D", "weight", weight.size(0), "x", x.size(-1));
}

inline void check_fused_layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const char* op = "fused_layer_norm";
  check_layer_norm_rows(op, x, weight);
  check_rank(op, "bias", bias, 1, "[D]");
  check_alike(op, "x", x, "bias", bias);
  check_same_size(op, "D", "bias", bias.size(0), "x", x.size(-1));
  check(eps >= 0, op, ": eps must be >= 0, got ", eps);
}

inline void check_fused_layer_norm_grad(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& mean,
                                        const Tensor& rstd) {
  const char* op = "fused_layer_norm_grad";
  check_layer_norm_rows(op, x, weight);
  check_alike(op, "x", x, "grad", grad);
  check(has_sizes(grad, x, x.dim()), op, ": grad must have the shape of x, ", shape_of(x), ", got shape ",
        shape_of(grad));
  const ScalarType wide = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  auto check_statistic = [&](const char* name, const Tensor& statistic) {
    check_dtype(op, name, statistic, wide);
    check(statistic.device() == x.device(), op, ": ", name, " and x must be on one device");
    check(has_sizes(statistic, x, x.dim() - 1), op, ": ", name, " must have one value a row of x, of shape ",
          shape_of(x), ", got shape ", shape_of(statistic));
  };
  check_statistic("mean", mean);
  check_statistic("rstd", rstd);
}

}  // namespace arr_coc
