#include <torch/csrc/stable/library.h>

#include "common/map.cuh"
#include "ops/relu/relu.h"

namespace arr_coc {
namespace {

Tensor relu_cuda(const Tensor& x) {
  check_relu(x);
  const CudaScope scope(x);
  const Tensor in = as_contiguous(x);
  Tensor out = torch::stable::new_empty(in, in.sizes());
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    launch_map(scope.stream(), Relu{}, static_cast<T*>(out.mutable_data_ptr()), out.numel(),
               static_cast<const T*>(in.const_data_ptr()));
  });
  return out;
}

Tensor relu_grad_cuda(const Tensor& grad, const Tensor& output) {
  check_relu_grad("relu_grad", grad, output);
  const CudaScope scope(output);
  const Tensor g = as_contiguous(grad), o = as_contiguous(output);
  Tensor grad_x = torch::stable::new_empty(o, o.sizes());
  dispatch_floating(o.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    launch_map(scope.stream(), ReluGrad{}, static_cast<T*>(grad_x.mutable_data_ptr()), grad_x.numel(),
               static_cast<const T*>(g.const_data_ptr()), static_cast<const T*>(o.const_data_ptr()));
  });
  return grad_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("relu", TORCH_BOX(&relu_cuda));
  m.impl("relu_grad", TORCH_BOX(&relu_grad_cuda));
}

}  // namespace arr_coc
