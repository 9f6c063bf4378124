#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.cuh"
#include "arr_coc/scale_bias_relu/scale_bias_relu.h"

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
      const A passed = ReluGrad<A>{}(upstream[i], out[i]);
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

}  // namespace

template <class T>
void run(const Cuda& device, const ScaleBiasReluGrad<T>& call) {
  using A = accumulate_t<T>;
  const auto [grad, output, scale, grad_x, grad_bias, rows, width] = call;
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
    device.launch(kernel, {grid, threads}, grad, output, scale, grad_x, grad_bias, rows, width, chunks);
    return;
  }
  Scratch<A> partial(device, chunks.count * width);
  const auto kernel = aligned ? grad_kernel<true, T, A> : grad_kernel<false, T, A>;
  device.launch(kernel, {grid, threads}, grad, output, scale, grad_x, partial.data(), rows, width, chunks);
  device.launch(sum_chunks_kernel<T>, {grid_size(width, kSumColumns, INT32_MAX), dim3(kSumColumns, kSumRows)},
                partial.data(), grad_bias, chunks.count, width);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("scale_bias_relu", TORCH_BOX(&scale_bias_relu<Cuda>));
  m.impl("scale_bias_relu_grad", TORCH_BOX(&scale_bias_relu_grad<Cuda>));
}

}  // namespace arr_coc
