#pragma once

#include <tuple>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

inline void check_row_statistic(const char* op, const char* name, const Tensor& statistic, const Tensor& x) {
  check_dtype(op, name, statistic, accumulate_dtype(x.scalar_type()));
  check(statistic.device() == x.device(), op, ": ", name, " and x must be on one device");
  check(statistic.sizes().equals(x.sizes().slice(0, x.dim() - 1)), op, ": ", name,
        " must have one value a row of x, of shape ", shape_of(x), ", got shape ", shape_of(statistic));
}

template <class T>
struct LayerNorm {
  using A = accumulate_t<T>;
  const T *x, *weight, *bias;
  T* y;
  A *mean, *rstd;
  int64_t rows, width;
  A eps;
};

// A null output is not computed.
template <class T>
struct LayerNormGrad {
  using A = accumulate_t<T>;
  const T *grad, *x, *weight;
  const A *mean, *rstd;
  T *grad_x, *grad_weight, *grad_bias;
  int64_t rows, width;
};

template <class Device>
std::tuple<Tensor, Tensor, Tensor> fused_layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                    double eps) {
  const char* op = "fused_layer_norm";
  check_rows_and_weight(op, x, weight);
  check_row(op, "bias", bias, x);
  check(eps >= 0, op, ": eps must be >= 0, got ", eps);
  const Device device(x);
  const Tensor in = as_contiguous(x), weights = as_contiguous(weight), biases = as_contiguous(bias);
  const auto sizes = in.sizes(), rows = sizes.slice(0, sizes.size() - 1);
  const int64_t width = in.size(-1);
  const ScalarType wide = accumulate_dtype(in.scalar_type());
  Tensor y = allocate(in, sizes), mean = allocate(in, rows, wide), rstd = allocate(in, rows, wide);
  if (in.numel() == 0) return {y, mean, rstd};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    run(device, LayerNorm<T>{data_of<T>(in), data_of<T>(weights), data_of<T>(biases), data_of<T>(y), data_of<A>(mean),
                             data_of<A>(rstd), in.numel() / width, width, A(eps)});
  });
  return {y, mean, rstd};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> fused_layer_norm_grad(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                         const Tensor& mean, const Tensor& rstd, bool need_x,
                                                         bool need_weight, bool need_bias) {
  const char* op = "fused_layer_norm_grad";
  check_rows_and_weight(op, x, weight);
  check_alike(op, "x", x, "grad", grad);
  check(grad.sizes().equals(x.sizes()), op, ": grad must have the shape of x, ", shape_of(x), ", got shape ",
        shape_of(grad));
  check_row_statistic(op, "mean", mean, x);
  check_row_statistic(op, "rstd", rstd, x);
  const Device device(x);
  const Tensor upstream = as_contiguous(grad), in = as_contiguous(x), weights = as_contiguous(weight),
               means = as_contiguous(mean), rstds = as_contiguous(rstd);
  const int64_t width = in.size(-1), rows = in.numel() / width;
  Tensor grad_x = allocate_if(need_x, in, in.sizes()), grad_weight = allocate_if(need_weight, in, {width}),
         grad_bias = allocate_if(need_bias, in, {width});
  if (rows == 0) return {grad_x, torch::stable::zero_(grad_weight), torch::stable::zero_(grad_bias)};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    run(device, LayerNormGrad<T>{data_of<T>(upstream), data_of<T>(in), data_of<T>(weights), data_of<A>(means),
                                 data_of<A>(rstds), data_of<T>(grad_x), data_of<T>(grad_weight), data_of<T>(grad_bias),
                                 rows, width});
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace arr_coc
