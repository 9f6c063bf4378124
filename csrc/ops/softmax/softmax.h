#pragma once

#include "common/checks.h"

namespace arr_coc {

inline void check_softmax(const Tensor& x) {
  const char* op = "softmax";
  check_floating(op, "x", x);
  check(x.dim() > 0, op, ": x must be [..., D], got shape ", shape_of(x));
}

inline void check_softmax_grad(const Tensor& grad, const Tensor& output) {
  const char* op = "softmax_grad";
  check_floating(op, "output", output);
  check(output.dim() > 0, op, ": output must be [..., D], got shape ", shape_of(output));
  check_alike(op, "output", output, "grad", grad);
  check_same_shape(op, "output", output, "grad", grad);
}

}  // namespace arr_coc
