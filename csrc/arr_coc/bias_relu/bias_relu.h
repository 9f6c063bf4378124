#pragma once

#include "arr_coc/common/map_tensors.h"

namespace arr_coc {

// NaN is not below 0, so it stays.
template <class A>
struct ScaleBiasRelu {
  A scale;
  ARR_COC_FUNCTION A operator()(A x, A bias) const {
    const A value = x * scale + bias;
    return value <= 0 ? A(0) : value;
  }
};

template <class Device>
Tensor bias_relu(const Tensor& x, const Tensor& bias) {
  check_x_and_bias("bias_relu", x, bias);
  return map_x_and_bias<Device, ScaleBiasRelu>(x, bias, 1);
}

}  // namespace arr_coc
