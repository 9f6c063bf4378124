#include "arr_coc/muladd/muladd.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/cpu.h"
#include "arr_coc/common/map.h"

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

}  // namespace

template <class T>
void run(const Cpu&, const MulAddGrad<T>& call) {
  using Times = Multiply<accumulate_t<T>>;
  parallel_rows(call.size, 2, [&](int64_t begin, int64_t end) {
    const T *grad = call.grad + begin, *a = call.a + begin, *b = call.b + begin;
    if (call.grad_a && call.grad_b && !std::is_same_v<T, Half>)  // which map_here has vectors for
      return grad_loop(grad, a, b, call.grad_a + begin, call.grad_b + begin, end - begin);
    if (call.grad_a) map_here(Times{}, call.grad_a + begin, end - begin, grad, b);
    if (call.grad_b) map_here(Times{}, call.grad_b + begin, end - begin, grad, a);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("muladd(Tensor a, Tensor b, float c) -> Tensor");
  m.def("muladd_grad(Tensor grad, Tensor a, Tensor b, bool need_a, bool need_b) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("muladd", TORCH_BOX(&muladd<Cpu>));
  m.impl("muladd_grad", TORCH_BOX(&muladd_grad<Cpu>));
}

}  // namespace arr_coc
