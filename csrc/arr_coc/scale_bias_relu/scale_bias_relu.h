#pragma once

#include <algorithm>
#include <tuple>

#include "arr_coc/bias_relu/bias_relu.h"
#include "arr_coc/relu/relu.h"

namespace arr_coc {

template <class A>
struct ScaleReluGrad {
  A scale;
  ARR_COC_FUNCTION A operator()(A grad, A output) const { return ReluGrad<A>{}(grad, output) * scale; }
};

// The gradient of the bias is summed over chunks of rows, then over the chunks. The order depends on the sizes alone.
struct RowChunks {
  int64_t rows_each, count;

  RowChunks(int64_t rows, int64_t most) : rows_each(std::max<int64_t>(kLeastRows, (rows + most - 1) / most)) {
    count = (rows + rows_each - 1) / rows_each;
  }

  static constexpr int64_t kLeastRows = 32;
};

// `grad_x` may be null; rows and width are at least 1.
template <class T>
struct ScaleBiasReluGrad {
  const T *grad, *output;
  accumulate_t<T> scale;
  T *grad_x, *grad_bias;
  int64_t rows, width;
};

template <class Device>
Tensor scale_bias_relu(const Tensor& x, const Tensor& bias, double scale) {
  check_x_and_bias("scale_bias_relu", x, bias);
  return map_x_and_bias<Device, ScaleBiasRelu>(x, bias, scale);
}

template <class Device>
std::tuple<Tensor, Tensor> scale_bias_relu_grad(const Tensor& grad, const Tensor& output, double scale, bool need_x,
                                                bool need_bias) {
  const char* op = "scale_bias_relu_grad";
  check_relu_grad(op, grad, output);
  check(output.dim() > 0, op, ": output must be [..., D], got shape ", shape_of(output));
  const Device device(output);
  const Tensor g = as_contiguous(grad), o = as_contiguous(output);
  const int64_t width = o.size(o.dim() - 1);
  Tensor grad_x = allocate_if(need_x, o, o.sizes()), grad_bias = allocate_if(need_bias, o, {width});
  if (o.numel() == 0) return {grad_x, torch::stable::zero_(grad_bias)};
  dispatch_floating(o.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T *upstream = data_of<T>(g), *out = data_of<T>(o);
    T *of_x = data_of<T>(grad_x), *of_bias = data_of<T>(grad_bias);
    if (need_bias)
      run(device, ScaleBiasReluGrad<T>{upstream, out, A(scale), of_x, of_bias, o.numel() / width, width});
    else if (need_x)
      map(device, ScaleReluGrad<A>{A(scale)}, of_x, o.numel(), upstream, out);
  });
  return {grad_x, grad_bias};
}

}  // namespace arr_coc
