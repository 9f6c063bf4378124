#pragma once

#include <tuple>

#include "arr_coc/common/map_tensors.h"

namespace arr_coc {

template <class A>
struct MulAdd {
  A c;
  ARR_COC_FUNCTION A operator()(A a, A b) const { return a * b + c; }
};

template <class A>
struct Multiply {
  ARR_COC_FUNCTION A operator()(A a, A b) const { return a * b; }
};

// A null output is not computed.
template <class T>
struct MulAddGrad {
  const T *grad, *a, *b;
  T *grad_a, *grad_b;
  int64_t size;
};

inline void check_muladd(const char* op, const Tensor& a, const Tensor& b) {
  check_floating(op, "a", a);
  check_alike(op, "a", a, "b", b);
  check_same_shape(op, "a", a, "b", b);
}

template <class Device>
Tensor muladd(const Tensor& a, const Tensor& b, double c) {
  check_muladd("muladd", a, b);
  return map_tensors<Device, MulAdd>({a, b}, c);
}

template <class Device>
std::tuple<Tensor, Tensor> muladd_grad(const Tensor& grad, const Tensor& a, const Tensor& b, bool need_a, bool need_b) {
  const char* op = "muladd_grad";
  check_muladd(op, a, b);
  check_alike(op, "a", a, "grad", grad);
  check_same_shape(op, "a", a, "grad", grad);
  const Device device(a);
  const Tensor upstream = as_contiguous(grad), x = as_contiguous(a), y = as_contiguous(b);
  Tensor grad_a = allocate_if(need_a, x, x.sizes()), grad_b = allocate_if(need_b, x, x.sizes());
  if (x.numel() == 0) return {grad_a, grad_b};
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, MulAddGrad<T>{data_of<T>(upstream), data_of<T>(x), data_of<T>(y), data_of<T>(grad_a),
                              data_of<T>(grad_b), x.numel()});
  });
  return {grad_a, grad_b};
}

}  // namespace arr_coc
