#include "ops/relu/relu.h"

#include <torch/csrc/stable/library.h>

#include "common/map.h"

namespace arr_coc {

template <>
constexpr bool kSelects<ReluGrad> = true;

namespace {

Tensor relu_cpu(const Tensor& x) {
  check_relu(x);
  const Tensor in = as_contiguous(x);
  Tensor out = allocate(in, in.sizes());
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    parallel_map(Relu{}, static_cast<T*>(out.mutable_data_ptr()), out.numel(),
                 static_cast<const T*>(in.const_data_ptr()));
  });
  return out;
}

Tensor relu_grad_cpu(const Tensor& grad, const Tensor& output) {
  check_relu_grad("relu_grad", grad, output);
  const Tensor g = as_contiguous(grad), o = as_contiguous(output);
  Tensor grad_x = allocate(o, o.sizes());
  dispatch_floating(o.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    parallel_map(ReluGrad{}, static_cast<T*>(grad_x.mutable_data_ptr()), grad_x.numel(),
                 static_cast<const T*>(g.const_data_ptr()), static_cast<const T*>(o.const_data_ptr()));
  });
  return grad_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("relu(Tensor x) -> Tensor");
  m.def("relu_grad(Tensor grad, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("relu", TORCH_BOX(&relu_cpu));
  m.impl("relu_grad", TORCH_BOX(&relu_grad_cpu));
}

}  // namespace arr_coc
