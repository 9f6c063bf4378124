// Helpers of bias_relu and scale_bias_relu.
#pragma once

#include "common/checks.h"

namespace arr_coc {

inline void check_x_and_bias(const char* op, const Tensor& x, const Tensor& bias) {
  check_floating(op, "x", x);
  check(x.dim() > 0, op, ": x must be [..., D], got shape ", shape_of(x));
  check_rank(op, "bias", bias, 1, "[D]");
  check_alike(op, "x", x, "bias", bias);
  check_same_size(op, "D", "bias", bias.size(0), "x", x.size(x.dim() - 1));
}

// NaN is not below 0, so it stays.
template <class A>
struct ScaleBiasRelu {
  A scale;
  ARR_COC_FUNCTION A operator()(A x, A bias) const {
    const A value = x * scale + bias;
    return value <= 0 ? A(0) : value;
  }
};

}  // namespace arr_coc
