#include <torch/csrc/stable/library.h>

#include "common/cuda.cuh"
#include "ops/compute_entropy/compute_entropy.h"

namespace arr_coc {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// One warp a row. See compute_entropy.cpp for the formula.
template <class A>
struct RowEntropy {
  A max, sum, nats;
};

template <class T, class A>
__device__ RowEntropy<A> row_entropy(const T* x, int64_t width, A scale, int lane) {
  A max = -INFINITY;
  for (int64_t d = lane; d < width; d += kWarpSize) max = nan_max(A(x[d]) * scale, max);
  max = warp_max(max);
  A sum = 0, weighted = 0;
  for (int64_t d = lane; d < width; d += kWarpSize) {
    const A shifted = A(x[d]) * scale - max, weight = exp(shifted);
    sum += weight;
    weighted += weight > 0 ? weight * shifted : weight;
  }
  sum = warp_sum(sum);
  weighted = warp_sum(weighted);
  return {max, sum, log(sum) - weighted / sum};
}

template <class T>
__global__ void entropy_kernel(const T* x, T* out, int64_t rows, int64_t width, accumulate_t<T> scale,
                               accumulate_t<T> norm) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; row < rows;
       row += int64_t(gridDim.x) * kWarps) {
    const auto r = row_entropy(x + row * width, width, scale, lane);
    if (lane == 0) out[row] = T(r.nats * norm);
  }
}

template <class T>
__global__ void entropy_grad_kernel(const T* upstream, const T* x, T* out, int64_t rows, int64_t width,
                                    accumulate_t<T> scale, accumulate_t<T> norm) {
  using A = accumulate_t<T>;
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; row < rows;
       row += int64_t(gridDim.x) * kWarps) {
    const auto r = row_entropy(x + row * width, width, scale, lane);
    const A factor = -A(upstream[row]) * norm, log_sum = log(r.sum);
    for (int64_t d = lane; d < width; d += kWarpSize) {
      const A log_p = A(x[row * width + d]) * scale - r.max - log_sum, p = exp(log_p);
      out[row * width + d] = T(p > 0 ? factor * p * (log_p + r.nats) : factor * p);
    }
  }
}

Tensor compute_entropy_cuda(const Tensor& features, double temperature) {
  check_compute_entropy(features, temperature);
  const CudaScope scope(features);
  const Tensor x = torch::stable::contiguous(features);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor entropy = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  if (rows == 0) return entropy;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    entropy_kernel<T><<<grid_size(rows, kWarps), kThreads, 0, scope.stream()>>>(
        static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(entropy.mutable_data_ptr()), rows, width,
        A(1 / temperature), width > 1 ? A(1 / std::log(double(width))) : A(0));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return entropy;
}

Tensor compute_entropy_grad_cuda(const Tensor& grad, const Tensor& features, double temperature) {
  check_compute_entropy_grad(grad, features, temperature);
  const CudaScope scope(features);
  const Tensor x = torch::stable::contiguous(features), g = torch::stable::contiguous(grad);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor grad_features = torch::stable::new_empty(x, {x.size(0), x.size(1), width});
  if (rows == 0) return grad_features;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    entropy_grad_kernel<T><<<grid_size(rows, kWarps), kThreads, 0, scope.stream()>>>(
        static_cast<const T*>(g.const_data_ptr()), static_cast<const T*>(x.const_data_ptr()),
        static_cast<T*>(grad_features.mutable_data_ptr()), rows, width, A(1 / temperature),
        width > 1 ? A(1 / (temperature * std::log(double(width)))) : A(0));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return grad_features;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("compute_entropy", TORCH_BOX(&compute_entropy_cuda));
  m.impl("compute_entropy_grad", TORCH_BOX(&compute_entropy_grad_cuda));
}

}  // namespace arr_coc
