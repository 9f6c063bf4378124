#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.cuh"
#include "arr_coc/muladd/muladd.h"

namespace arr_coc {
namespace {

// Computes both gradients and reads `grad` once, with 16 bytes of each tensor per thread.
template <bool kAligned, class T>
__global__ void __launch_bounds__(kMapThreads)
    grad_kernel(const T* grad, const T* a, const T* b, T* grad_a, T* grad_b, int64_t size) {
  using A = accumulate_t<T>;
  const int64_t at = (int64_t(blockIdx.x) * kMapThreads + threadIdx.x) * kVector<T>;
  if (at >= size) return;
  const bool all = kAligned && at + kVector<T> <= size;
  const auto read = [&](const T* from, A(&values)[kVector<T>]) {
    unpack<T>(all ? load_vector<kAligned>(from, at, size) : load_vector<false>(from, at, size), values);
  };
  const auto write = [&](T* to, const A(&values)[kVector<T>]) {
    if (all)
      store_vector<kAligned>(to, at, size, pack<T>(values));
    else
      store_vector<false>(to, at, size, pack<T>(values));
  };
  A upstream[kVector<T>], of_a[kVector<T>], of_b[kVector<T>];
  read(grad, upstream);
  read(b, of_a);
  read(a, of_b);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    of_a[i] *= upstream[i];
    of_b[i] *= upstream[i];
  }
  write(grad_a, of_a);
  write(grad_b, of_b);
}

}  // namespace

template <class T>
void run(const Cuda& device, const MulAddGrad<T>& call) {
  const auto [grad, a, b, grad_a, grad_b, size] = call;
  if (!grad_a || !grad_b) {
    if (grad_a) map(device, Multiply<accumulate_t<T>>{}, grad_a, size, grad, b);
    if (grad_b) map(device, Multiply<accumulate_t<T>>{}, grad_b, size, grad, a);
    return;
  }
  const auto kernel = start_on_16_bytes(grad, a, b, grad_a, grad_b) ? grad_kernel<true, T> : grad_kernel<false, T>;
  device.launch(kernel, {map_blocks<T>(size), kMapThreads}, grad, a, b, grad_a, grad_b, size);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("muladd", TORCH_BOX(&muladd<Cuda>));
  m.impl("muladd_grad", TORCH_BOX(&muladd_grad<Cuda>));
}

}  // namespace arr_coc
