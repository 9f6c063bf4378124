#pragma once

#include "common/x_and_bias.h"

namespace arr_coc {

inline void check_bias_relu(const Tensor& x, const Tensor& bias) { check_x_and_bias("bias_relu", x, bias); }

}  // namespace arr_coc
