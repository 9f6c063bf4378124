#pragma once

#include "arr_coc/common/map_tensors.h"

namespace arr_coc {

// NaN is not below 0, so it stays.
template <class A>
struct Relu {
  ARR_COC_FUNCTION A operator()(A x) const { return x <= 0 ? A(0) : x; }
};

// Like in torch, the gradient passes where the output is NaN.
template <class A>
struct ReluGrad {
  ARR_COC_FUNCTION A operator()(A grad, A output) const { return output <= 0 ? A(0) : grad; }
};

inline void check_relu_grad(const char* op, const Tensor& grad, const Tensor& output) {
  check_floating(op, "output", output);
  check_alike(op, "output", output, "grad", grad);
  check_same_shape(op, "output", output, "grad", grad);
}

template <class Device>
Tensor relu(const Tensor& x) {
  check_floating("relu", "x", x);
  return map_tensors<Device, Relu>({x});
}

template <class Device>
Tensor relu_grad(const Tensor& grad, const Tensor& output) {
  check_relu_grad("relu_grad", grad, output);
  return map_tensors<Device, ReluGrad>({grad, output});
}

}  // namespace arr_coc
