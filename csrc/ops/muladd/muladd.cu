#include <torch/csrc/stable/library.h>

#include "common/map.cuh"
#include "ops/muladd/muladd.h"

namespace arr_coc {
namespace {

Tensor muladd_cuda(const Tensor& a, const Tensor& b, double c) {
  check_muladd(a, b);
  const CudaScope scope(a);
  const Tensor x = as_contiguous(a), y = as_contiguous(b);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    launch_map(scope.stream(), MulAdd<A>{A(c)}, static_cast<T*>(out.mutable_data_ptr()), out.numel(),
               static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(y.const_data_ptr()));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("muladd", TORCH_BOX(&muladd_cuda)); }

}  // namespace arr_coc
