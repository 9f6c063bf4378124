#include "ops/muladd/muladd.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/map.h"
#include "common/prefetch.h"

namespace arr_coc {
namespace {

// Computes both gradients and reads `grad` once.
template <class T>
ARR_COC_EVERY_ISA void grad_loop(const T* grad, const T* a, const T* b, T* grad_a, T* grad_b, int64_t size) {
  for (int64_t begin = 0; begin < size; begin += kPrefetchBlock) {
    prefetch_behind(grad + begin);
    prefetch_behind(a + begin);
    prefetch_behind(b + begin);
    const int64_t end = std::min(begin + kPrefetchBlock, size);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      grad_a[i] = store<T>(load(grad[i]) * load(b[i]));
      grad_b[i] = store<T>(load(grad[i]) * load(a[i]));
    }
  }
}

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

std::tuple<Tensor, Tensor> muladd_grad_cpu(const Tensor& grad, const Tensor& a, const Tensor& b, bool need_a,
                                           bool need_b) {
  check_muladd_grad(grad, a, b);
  const Tensor upstream = as_contiguous(grad), x = as_contiguous(a), y = as_contiguous(b);
  Tensor grad_a = need_a ? allocate(x, x.sizes()) : allocate(x, {0});
  Tensor grad_b = need_b ? allocate(x, x.sizes()) : allocate(x, {0});
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T *g = static_cast<const T*>(upstream.const_data_ptr()), *of_x = static_cast<const T*>(x.const_data_ptr()),
            *of_y = static_cast<const T*>(y.const_data_ptr());
    T *out_a = static_cast<T*>(grad_a.mutable_data_ptr()), *out_b = static_cast<T*>(grad_b.mutable_data_ptr());
    parallel_rows(x.numel(), 2, [&](int64_t begin, int64_t end) {
      const int64_t size = end - begin;
      if (need_a && need_b && !std::is_same_v<T, Half>)  // which `map` has vectors for
        return grad_loop(g + begin, of_x + begin, of_y + begin, out_a + begin, out_b + begin, size);
      if (need_a) map(Multiply{}, out_a + begin, size, g + begin, of_y + begin);
      if (need_b) map(Multiply{}, out_b + begin, size, g + begin, of_x + begin);
    });
  });
  return {grad_a, grad_b};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("muladd(Tensor a, Tensor b, float c) -> Tensor");
  m.def("muladd_grad(Tensor grad, Tensor a, Tensor b, bool need_a, bool need_b) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("muladd", TORCH_BOX(&muladd_cpu));
  m.impl("muladd_grad", TORCH_BOX(&muladd_grad_cpu));
}

}  // namespace arr_coc
