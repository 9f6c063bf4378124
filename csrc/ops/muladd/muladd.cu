#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/map.cuh"
#include "ops/muladd/muladd.h"

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

std::tuple<Tensor, Tensor> muladd_grad_cuda(const Tensor& grad, const Tensor& a, const Tensor& b, bool need_a,
                                            bool need_b) {
  check_muladd_grad(grad, a, b);
  const CudaScope scope(a);
  const Tensor upstream = as_contiguous(grad), x = as_contiguous(a), y = as_contiguous(b);
  Tensor grad_a = need_a ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(x, {0});
  Tensor grad_b = need_b ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_empty(x, {0});
  const int64_t size = x.numel();
  if (size == 0) return {grad_a, grad_b};
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T *g = static_cast<const T*>(upstream.const_data_ptr()), *of_x = static_cast<const T*>(x.const_data_ptr()),
            *of_y = static_cast<const T*>(y.const_data_ptr());
    T *out_a = static_cast<T*>(grad_a.mutable_data_ptr()), *out_b = static_cast<T*>(grad_b.mutable_data_ptr());
    if (!need_a || !need_b) {
      if (need_a) launch_map(scope.stream(), Multiply{}, out_a, size, g, of_y);
      if (need_b) launch_map(scope.stream(), Multiply{}, out_b, size, g, of_x);
      return;
    }
    const auto kernel = start_on_16_bytes(g, of_x, of_y, out_a, out_b) ? grad_kernel<true, T> : grad_kernel<false, T>;
    kernel<<<map_blocks<T>(size), kMapThreads, 0, scope.stream()>>>(g, of_x, of_y, out_a, out_b, size);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {grad_a, grad_b};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("muladd", TORCH_BOX(&muladd_cuda));
  m.impl("muladd_grad", TORCH_BOX(&muladd_grad_cuda));
}

}  // namespace arr_coc
