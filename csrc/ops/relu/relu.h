#pragma once

#include "common/checks.h"

namespace arr_coc {

inline void check_relu(const Tensor& x) { check_floating("relu", "x", x); }

inline void check_relu_grad(const char* op, const Tensor& grad, const Tensor& output) {
  check_floating(op, "output", output);
  check_alike(op, "output", output, "grad", grad);
  check_same_shape(op, "output", output, "grad", grad);
}

// NaN is not below 0, so it stays.
struct Relu {
  template <class A>
  ARR_COC_FUNCTION A operator()(A x) const {
    return x <= 0 ? A(0) : x;
  }
};

// Like in torch, the gradient passes where the output is NaN.
struct ReluGrad {
  template <class A>
  ARR_COC_FUNCTION A operator()(A grad, A output) const {
    return output <= 0 ? A(0) : grad;
  }
};

}  // namespace arr_coc
