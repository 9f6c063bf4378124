#pragma once

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

template <class T>
struct Softmax {
  const T* x;
  T* out;
  int64_t rows, width;
};

// With y the output: y (grad - sum of grad y).
template <class T>
struct SoftmaxGrad {
  const T *grad, *output;
  T* out;
  int64_t rows, width;
};

template <class Device>
Tensor softmax(const Tensor& x) {
  const char* op = "softmax";
  check_floating(op, "x", x);
  check(x.dim() > 0, op, ": x must be [..., D], got shape ", shape_of(x));
  const Device device(x);
  const Tensor in = as_contiguous(x);
  Tensor out = allocate(in, in.sizes());
  if (in.numel() == 0) return out;
  const int64_t width = in.size(in.dim() - 1);
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, Softmax<T>{data_of<T>(in), data_of<T>(out), in.numel() / width, width});
  });
  return out;
}

template <class Device>
Tensor softmax_grad(const Tensor& grad, const Tensor& output) {
  const char* op = "softmax_grad";
  check_floating(op, "output", output);
  check(output.dim() > 0, op, ": output must be [..., D], got shape ", shape_of(output));
  check_alike(op, "output", output, "grad", grad);
  check_same_shape(op, "output", output, "grad", grad);
  const Device device(output);
  const Tensor g = as_contiguous(grad), y = as_contiguous(output);
  Tensor out = allocate(y, y.sizes());
  if (y.numel() == 0) return out;
  const int64_t width = y.size(y.dim() - 1);
  dispatch_floating(y.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, SoftmaxGrad<T>{data_of<T>(g), data_of<T>(y), data_of<T>(out), y.numel() / width, width});
  });
  return out;
}

}  // namespace arr_coc
