#pragma once

#include "common/scale_bias_relu.h"

namespace arr_coc {

inline void check_bias_relu(const Tensor& x, const Tensor& bias) { check_x_and_bias("bias_relu", x, bias); }

}  // namespace arr_coc
