#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/map.cuh"
#include "ops/scale_bias_relu/scale_bias_relu.h"

namespace arr_coc {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 1024;  // about as many as fill the device
constexpr int kSumColumns = 32, kSumRows = 32;

// The sum over threadIdx.y in a fixed order, in the threads whose threadIdx.y is 0. blockDim.y is a power of two.
template <int kCount, class A>
__device__ __forceinline__ void sum_over_y(A (&sums)[kCount], A (*shared)[kCount]) {
  const int place = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kCount; ++i) shared[place][i] = sums[i];
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) shared[place][i] = sums[i] += shared[place + half * blockDim.x][i];
    }
  }
}

// A block takes a chunk of rows, and blockDim.x vectors of columns. `grad_x` may be null; the chunk's sums go to
// `sums`, [chunks, width].
template <bool kAligned, class T, class O>
__global__ void __launch_bounds__(kThreads)
    grad_kernel(const T* __restrict__ grad, const T* __restrict__ output, accumulate_t<T> scale, T* __restrict__ grad_x,
                O* __restrict__ sums, int64_t rows, int64_t width, RowChunks chunks) {
  using A = accumulate_t<T>;
  __shared__ A shared[kThreads][kVector<T>];
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kVector<T>;
  const int64_t begin = blockIdx.y * chunks.rows_each, end = min(begin + chunks.rows_each, rows);
  A sum[kVector<T>] = {};
#pragma unroll 4
  for (int64_t row = begin + threadIdx.y; row < end; row += blockDim.y) {
    A upstream[kVector<T>], out[kVector<T>];
    unpack<T>(load_vector<kAligned>(grad + row * width, at, width), upstream);
    unpack<T>(load_vector<kAligned>(output + row * width, at, width), out);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      const A passed = ReluGrad{}(upstream[i], out[i]);
      sum[i] += passed;
      upstream[i] = passed * scale;
    }
    if (grad_x) store_vector<kAligned>(grad_x + row * width, at, width, pack<T>(upstream));
  }
  sum_over_y(sum, shared);
  if (threadIdx.y > 0) return;
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i)
    if (at + i < width) sums[blockIdx.y * width + at + i] = O(sum[i]);
}

template <class T>
__global__ void sum_chunks_kernel(const accumulate_t<T>* partial, T* grad_bias, int64_t chunks, int64_t width) {
  using A = accumulate_t<T>;
  __shared__ A shared[kSumColumns * kSumRows][1];
  const int64_t column = int64_t(blockIdx.x) * kSumColumns + threadIdx.x;
  A sum[1] = {};
  for (int64_t chunk = threadIdx.y; chunk < chunks && column < width; chunk += kSumRows)
    sum[0] += partial[chunk * width + column];
  sum_over_y(sum, shared);
  if (threadIdx.y == 0 && column < width) grad_bias[column] = T(sum[0]);
}

// `grad_x` may be null; rows and width are at least 1.
template <class T>
void launch_grad(cudaStream_t stream, const Tensor& like, const T* grad, const T* output, accumulate_t<T> scale,
                 T* grad_x, T* grad_bias, int64_t rows, int64_t width) {
  using A = accumulate_t<T>;
  const int64_t vectors = (width + kVector<T> - 1) / kVector<T>;
  unsigned across = 1;
  while (across < kWarpSize && across < vectors) across *= 2;
  const int64_t column_blocks = (vectors + across - 1) / across;
  const RowChunks chunks(rows, std::max<int64_t>(1, kBlocks / column_blocks));
  const dim3 grid(static_cast<unsigned>(column_blocks), static_cast<unsigned>(chunks.count));
  const dim3 threads(across, kThreads / across);
  const bool aligned = width % kVector<T> == 0 && start_on_16_bytes(grad, output, grad_x);
  if (chunks.count == 1) {
    const auto kernel = aligned ? grad_kernel<true, T, T> : grad_kernel<false, T, T>;
    kernel<<<grid, threads, 0, stream>>>(grad, output, scale, grad_x, grad_bias, rows, width, chunks);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  constexpr auto kPartial = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
  Tensor partial = torch::stable::new_empty(like, {chunks.count, width}, kPartial);
  A* sums = static_cast<A*>(partial.mutable_data_ptr());
  const auto kernel = aligned ? grad_kernel<true, T, A> : grad_kernel<false, T, A>;
  kernel<<<grid, threads, 0, stream>>>(grad, output, scale, grad_x, sums, rows, width, chunks);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  sum_chunks_kernel<T><<<grid_size(width, kSumColumns, INT32_MAX), dim3(kSumColumns, kSumRows), 0, stream>>>(
      sums, grad_bias, chunks.count, width);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor scale_bias_relu_cuda(const Tensor& x, const Tensor& bias, double scale) {
  check_scale_bias_relu(x, bias);
  const CudaScope scope(x);
  const Tensor in = as_contiguous(x), row = as_contiguous(bias);
  Tensor out = torch::stable::new_empty(in, in.sizes());
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    launch_map_rows(scope.stream(), ScaleBiasRelu<A>{A(scale)}, static_cast<T*>(out.mutable_data_ptr()), out.numel(),
                    static_cast<const T*>(in.const_data_ptr()), static_cast<const T*>(row.const_data_ptr()),
                    row.size(0));
  });
  return out;
}

std::tuple<Tensor, Tensor> scale_bias_relu_grad_cuda(const Tensor& grad, const Tensor& output, double scale,
                                                     bool need_x, bool need_bias) {
  check_scale_bias_relu_grad(grad, output);
  const CudaScope scope(output);
  const Tensor g = as_contiguous(grad), o = as_contiguous(output);
  const int64_t width = o.size(o.dim() - 1);
  Tensor grad_x = need_x ? torch::stable::new_empty(o, o.sizes()) : torch::stable::new_empty(o, {0});
  Tensor grad_bias = torch::stable::new_empty(o, {need_bias ? width : 0});
  if (o.numel() == 0) {
    if (grad_bias.numel() > 0) torch::stable::zero_(grad_bias);
    return {grad_x, grad_bias};
  }
  dispatch_floating(o.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* upstream = static_cast<const T*>(g.const_data_ptr());
    const T* out = static_cast<const T*>(o.const_data_ptr());
    T* of_x = need_x ? static_cast<T*>(grad_x.mutable_data_ptr()) : nullptr;
    if (need_bias)
      launch_grad(scope.stream(), o, upstream, out, A(scale), of_x, static_cast<T*>(grad_bias.mutable_data_ptr()),
                  o.numel() / width, width);
    else if (need_x)
      launch_map(scope.stream(), ScaleReluGrad<A>{A(scale)}, of_x, o.numel(), upstream, out);
  });
  return {grad_x, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("scale_bias_relu", TORCH_BOX(&scale_bias_relu_cuda));
  m.impl("scale_bias_relu_grad", TORCH_BOX(&scale_bias_relu_grad_cuda));
}

}  // namespace arr_coc
