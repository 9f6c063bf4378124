#include "ops/bias_relu/bias_relu.h"

#include <torch/csrc/stable/library.h>

#include "common/map.h"

namespace arr_coc {
namespace {

Tensor bias_relu_cpu(const Tensor& x, const Tensor& bias) {
  check_bias_relu(x, bias);
  const Tensor in = as_contiguous(x), row = as_contiguous(bias);
  Tensor out = allocate(in, in.sizes());
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    parallel_map_rows(ScaleBiasRelu<accumulate_t<T>>{1}, static_cast<T*>(out.mutable_data_ptr()), out.numel(),
                      static_cast<const T*>(in.const_data_ptr()), static_cast<const T*>(row.const_data_ptr()),
                      row.size(0));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) { m.def("bias_relu(Tensor x, Tensor bias) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("bias_relu", TORCH_BOX(&bias_relu_cpu)); }

}  // namespace arr_coc
