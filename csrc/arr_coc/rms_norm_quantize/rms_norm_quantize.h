#pragma once

#include <limits>
#include <tuple>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

constexpr double kQuantizedMax = 127;

// Rows with a smaller scale count as zeros, because 1 / scale would overflow.
constexpr float kScaleMin = std::numeric_limits<float>::min();

template <class T>
struct RmsNormQuantize {
  const T *x, *weight;
  int8_t* quantized;
  float* scale;
  int64_t rows, width;
  accumulate_t<T> eps;
};

template <class Device>
std::tuple<Tensor, Tensor> rms_norm_quantize(const Tensor& x, const Tensor& weight, double eps) {
  const char* op = "rms_norm_quantize";
  check_rows_and_weight(op, x, weight);
  check(eps >= 0, op, ": eps must be >= 0, got ", eps);
  const Device device(x);
  const Tensor in = as_contiguous(x), weights = as_contiguous(weight);
  const auto sizes = in.sizes();
  const int64_t width = in.size(-1);
  Tensor quantized = allocate(in, sizes, ScalarType::Char),
         scale = allocate(in, sizes.slice(0, sizes.size() - 1), ScalarType::Float);
  if (in.numel() == 0) return {quantized, scale};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, RmsNormQuantize<T>{data_of<T>(in), data_of<T>(weights), data_of<int8_t>(quantized),
                                   data_of<float>(scale), in.numel() / width, width, accumulate_t<T>(eps)});
  });
  return {quantized, scale};
}

}  // namespace arr_coc
