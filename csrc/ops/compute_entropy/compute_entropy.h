#pragma once

#include "common/checks.h"

namespace arr_coc {

inline void check_compute_entropy(const Tensor& features, double temperature) {
  const char* op = "compute_entropy";
  check_rank(op, "features", features, 3, "[B, N, D]");
  check_floating(op, "features", features);
  check(features.size(2) > 0, op, ": features must have D >= 1, got shape ", shape_of(features));
  check(temperature > 0, op, ": temperature must be > 0, got ", temperature);
}

inline void check_compute_entropy_grad(const Tensor& grad, const Tensor& features, double temperature) {
  const char* op = "compute_entropy_grad";
  check_compute_entropy(features, temperature);
  check_rank(op, "grad", grad, 2, "[B, N]");
  check_alike(op, "features", features, "grad", grad);
  check_same_size(op, "B", "grad", grad.size(0), "features", features.size(0));
  check_same_size(op, "N", "grad", grad.size(1), "features", features.size(1));
}

}  // namespace arr_coc
