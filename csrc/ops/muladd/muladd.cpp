#include "ops/muladd/muladd.h"

#include <torch/csrc/stable/library.h>

#include "common/map.h"

namespace arr_coc {
namespace {

Tensor muladd_cpu(const Tensor& a, const Tensor& b, double c) {
  check_muladd(a, b);
  const Tensor x = as_contiguous(a), y = as_contiguous(b);
  Tensor out = allocate(x, x.sizes());
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    parallel_map(MulAdd<A>{A(c)}, static_cast<T*>(out.mutable_data_ptr()), out.numel(),
                 static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(y.const_data_ptr()));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) { m.def("muladd(Tensor a, Tensor b, float c) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("muladd", TORCH_BOX(&muladd_cpu)); }

}  // namespace arr_coc
