#pragma once

#include <limits>

#include "common/checks.h"

namespace arr_coc {

constexpr double kQuantizedMax = 127;

// Rows with a smaller scale count as zeros, because 1 / scale would overflow.
constexpr float kScaleMin = std::numeric_limits<float>::min();

inline void check_rms_norm_quantize(const Tensor& x, const Tensor& weight, double eps) {
  const char* op = "rms_norm_quantize";
  check_floating(op, "x", x);
  check(x.dim() >= 1 && x.size(-1) >= 1, op, ": x must be [..., D] with D >= 1, got shape ", shape_of(x));
  check_rank(op, "weight", weight, 1, "[D]");
  check_alike(op, "x", x, "weight", weight);
  check_same_size(op, "D", "weight", weight.size(0), "x", x.size(-1));
  check(eps >= 0, op, ": eps must be >= 0, got ", eps);
}

}  // namespace arr_coc
