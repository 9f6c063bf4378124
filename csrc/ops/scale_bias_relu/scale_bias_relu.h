#pragma once

#include <algorithm>

#include "common/x_and_bias.h"
#include "ops/relu/relu.h"

namespace arr_coc {

inline void check_scale_bias_relu(const Tensor& x, const Tensor& bias) { check_x_and_bias("scale_bias_relu", x, bias); }

inline void check_scale_bias_relu_grad(const Tensor& grad, const Tensor& output) {
  const char* op = "scale_bias_relu_grad";
  check_relu_grad(op, grad, output);
  check(output.dim() > 0, op, ": output must be [..., D], got shape ", shape_of(output));
}

template <class A>
struct ScaleReluGrad {
  A scale;
  ARR_COC_FUNCTION A operator()(A grad, A output) const { return ReluGrad{}(grad, output) * scale; }
};

// The gradient of the bias is summed over chunks of rows, then over the chunks. The order depends on the sizes alone.
struct RowChunks {
  int64_t rows_each, count;

  RowChunks(int64_t rows, int64_t most) : rows_each(std::max<int64_t>(kLeastRows, (rows + most - 1) / most)) {
    count = (rows + rows_each - 1) / rows_each;
  }

  static constexpr int64_t kLeastRows = 32;
};

}  // namespace arr_coc
