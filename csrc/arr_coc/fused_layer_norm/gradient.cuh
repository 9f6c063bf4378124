// The kernels of fused_layer_norm's gradients on CUDA.
#pragma once

#include <algorithm>

#include "arr_coc/common/held_rows.cuh"

namespace arr_coc {
namespace {

template <class A>
struct Sum {
  __device__ A operator()(int, A a, A b) const { return a + b; }
};

// The most threads of a block that keeps sums of its columns, so that each may use 168 registers.
constexpr int kGradThreads = 384;

template <class T>
struct Backward {
  using A = accumulate_t<T>;
  const T *grad, *x, *weight;
  const A *mean, *rstd;
  T* grad_x;   // null where it is not needed
  A* partial;  // [2, parts, width]: sums of grad z and of grad over the rows of a part; null where not needed
  int64_t rows, width, parts;
};

// The sums over a row that d x needs: of g and of g z, with g = grad weight.
template <class T, class A>
__device__ __forceinline__ void add_products(const uint4& grad, const uint4& x, const uint4& weight, A mean, A rstd,
                                             A (&sums)[2]) {
  A g[kVector<T>], values[kVector<T>], weights[kVector<T>];
  unpack<T>(grad, g);
  unpack<T>(x, values);
  unpack<T>(weight, weights);
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) {
    const A weighted = g[j] * weights[j];
    sums[0] += weighted;
    sums[1] += weighted * ((values[j] - mean) * rstd);
  }
}

template <class T, class A>
__device__ __forceinline__ uint4 grad_of_x(const uint4& grad, const uint4& x, const uint4& weight, A mean, A rstd,
                                           const A (&means)[2]) {
  A g[kVector<T>], values[kVector<T>], weights[kVector<T>];
  unpack<T>(grad, g);
  unpack<T>(x, values);
  unpack<T>(weight, weights);
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j)
    values[j] = rstd * (g[j] * weights[j] - means[0] - (values[j] - mean) * rstd * means[1]);
  return pack<T>(values);
}

template <class T, class A>
__device__ __forceinline__ void add_to_columns(const uint4& grad, const uint4& x, A mean, A rstd,
                                               A (&of_weight)[kVector<T>], A (&of_bias)[kVector<T>]) {
  A g[kVector<T>], values[kVector<T>];
  unpack<T>(grad, g);
  unpack<T>(x, values);
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) {
    of_weight[j] += g[j] * ((values[j] - mean) * rstd);
    of_bias[j] += g[j];
  }
}

// Reads grad and x once for all three gradients: every thread keeps the sums of its columns over its block's part of
// the rows.
template <class T, int kVectors, bool kBlock, bool kAligned, bool kColumns>
__global__ void __launch_bounds__(kBlock ? kGradThreads : kRowWarps* kWarpSize) held_grad_kernel(Backward<T> call) {
  using A = accumulate_t<T>;
  constexpr int kPer = kVector<T>;
  __shared__ A shared[2][kRowThreads / kWarpSize][2];
  const RowGroup<kBlock> group;
  uint4 weight[kVectors];
  A of_weight[kColumns ? kVectors : 1][kPer] = {}, of_bias[kColumns ? kVectors : 1][kPer] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    weight[i] = load_vector<kAligned>(call.weight, group.template at<T>(i), call.width);
  int parity = 0;
  for (int64_t row = group.first; row < call.rows; row += group.stride, parity ^= 1) {
    const T *grad = call.grad + row * call.width, *x = call.x + row * call.width;
    uint4 g[kVectors], values[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      g[i] = load_vector<kAligned>(grad, group.template at<T>(i), call.width);
      values[i] = load_vector<kAligned>(x, group.template at<T>(i), call.width);
    }
    const A mean = call.mean[row], rstd = call.rstd[row];
    A sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      keep_packed(weight[i]);
      add_products<T>(g[i], values[i], weight[i], mean, rstd, sums);
      if constexpr (kColumns) add_to_columns<T>(g[i], values[i], mean, rstd, of_weight[i], of_bias[i]);
    }
    group.combine(sums, shared[parity], A(0), Sum<A>());
    const A means[2] = {sums[0] / A(call.width), sums[1] / A(call.width)};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      keep_packed(g[i]);
      keep_packed(values[i]);
      keep_packed(weight[i]);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      store_vector<kAligned>(call.grad_x + row * call.width, group.template at<T>(i), call.width,
                             grad_of_x<T>(g[i], values[i], weight[i], mean, rstd, means));
  }
  if constexpr (kColumns) {
    A* out[2] = {call.partial + blockIdx.x * call.width, call.partial + (call.parts + blockIdx.x) * call.width};
    if constexpr (!kBlock) {  // the warps' sums, added up in the order of the warps
      __shared__ A columns[2][kVectors * kPer][kWarpSize];
      const int warps = blockDim.x / kWarpSize;
      for (int warp = 0; warp < warps; ++warp) {
        if (int(threadIdx.x) / kWarpSize == warp) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
#pragma unroll
            for (int j = 0; j < kPer; ++j) {
              A &w = columns[0][i * kPer + j][group.lane], &b = columns[1][i * kPer + j][group.lane];
              w = of_weight[i][j] += warp ? w : A(0);
              b = of_bias[i][j] += warp ? b : A(0);
            }
          }
        }
        __syncthreads();
      }
      if (int(threadIdx.x) / kWarpSize != warps - 1) return;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int64_t d = group.template at<T>(i) + j;
        if (d < call.width) out[0][d] = of_weight[i][j], out[1][d] = of_bias[i][j];
      }
    }
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads) long_grad_kernel(Backward<T> call) {
  using A = accumulate_t<T>;
  __shared__ A shared[2][kRowThreads / kWarpSize][2];
  const RowGroup<true> group;
  int parity = 0;
  for (int64_t row = group.first; row < call.rows; row += group.stride, parity ^= 1) {
    const A mean = call.mean[row], rstd = call.rstd[row];
    auto each_vector = [&](auto f) {
#pragma unroll 4
      for (int64_t at = group.template at<T>(0); at < call.width; at += group.size * kVector<T>)
        f(at, load_vector<kAligned>(call.grad + row * call.width, at, call.width),
          load_vector<kAligned>(call.x + row * call.width, at, call.width),
          load_vector<kAligned>(call.weight, at, call.width));
    };
    A sums[2] = {0, 0};
    each_vector([&](int64_t, const uint4& g, const uint4& x, const uint4& weight) {
      add_products<T>(g, x, weight, mean, rstd, sums);
    });
    group.combine(sums, shared[parity], A(0), Sum<A>());
    const A means[2] = {sums[0] / A(call.width), sums[1] / A(call.width)};
    each_vector([&](int64_t at, const uint4& g, const uint4& x, const uint4& weight) {
      store_vector<kAligned>(call.grad_x + row * call.width, at, call.width,
                             grad_of_x<T>(g, x, weight, mean, rstd, means));
    });
  }
}

// Computes only the columns' sums: a thread takes kVector columns over the rows of a part.
template <class T, bool kAligned>
__global__ void __launch_bounds__(128) columns_grad_kernel(Backward<T> call) {
  using A = accumulate_t<T>;
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kVector<T>, part = blockIdx.y;
  if (at >= call.width) return;
  A of_weight[kVector<T>] = {}, of_bias[kVector<T>] = {};
#pragma unroll 4
  for (int64_t row = part; row < call.rows; row += call.parts)
    add_to_columns<T>(load_vector<kAligned>(call.grad + row * call.width, at, call.width),
                      load_vector<kAligned>(call.x + row * call.width, at, call.width), call.mean[row], call.rstd[row],
                      of_weight, of_bias);
  store_values<false>(call.partial + part * call.width, at, call.width, of_weight);
  store_values<false>(call.partial + (call.parts + part) * call.width, at, call.width, of_bias);
}

constexpr int kSumRows = 32;

// out[d] = the sum of partial[part, d] over the parts, the two halves of `partial` side by side.
template <class T, class A>
__global__ void __launch_bounds__(kWarpSize* kSumRows)
    sum_parts_kernel(const A* partial, T* grad_weight, T* grad_bias, int64_t parts, int64_t width) {
  __shared__ A shared[kSumRows][kWarpSize + 1];
  T* out = blockIdx.y == 0 ? grad_weight : grad_bias;
  if (!out) return;
  partial += blockIdx.y * parts * width;
  const int64_t d = int64_t(blockIdx.x) * kWarpSize + threadIdx.x;
  A sum = 0;
  if (d < width)
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += kSumRows) sum += partial[part * width + d];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_sum(shared[threadIdx.x][threadIdx.y]);
  const int64_t column = int64_t(blockIdx.x) * kWarpSize + threadIdx.y;
  if (threadIdx.x == 0 && column < width) out[column] = T(sum);
}

// The number of parts of the rows: as many blocks as a Hopper GPU holds at once, and no more, because each writes its
// sums. It depends on the shape alone, so that every GPU adds in the same order.
template <class T>
int64_t parts_of(int64_t rows, int64_t width) {
  const int64_t vectors = (width + kVector<T> - 1) / kVector<T>;
  const bool warps = vectors <= kMostVectors * kWarpSize;
  const int64_t threads = warps ? kRowWarps * kWarpSize : std::min<int64_t>(kGradThreads, (vectors + 3) / kMostVectors);
  const int64_t most = 132 * (kGradThreads / threads), part_rows = 4 * (warps ? kRowWarps : 1);
  return std::max<int64_t>(1, std::min(most, (rows + part_rows - 1) / part_rows));
}

template <class T, bool kAligned>
void launch_grad(const Backward<T>& call, T* grad_weight, T* grad_bias, const Cuda& device) {
  bool held = false;
  if (call.grad_x) {
    held = for_held_rows<T>(call.width, kGradThreads, [&](auto vectors, auto is_block, unsigned threads) {
      if (call.partial) {
        device.launch(held_grad_kernel<T, vectors, is_block, kAligned, true>, {unsigned(call.parts), threads}, call);
      } else {
        device.launch(held_grad_kernel<T, vectors, is_block, kAligned, false>,
                      {grid_size(call.rows, is_block ? 1 : kRowWarps), threads}, call);
      }
    });
    if (!held) device.launch(long_grad_kernel<T, kAligned>, {grid_size(call.rows, 1), kRowThreads}, call);
  }
  if (!call.partial) return;
  if (!held) {
    const int64_t vectors = (call.width + kVector<T> - 1) / kVector<T>;
    const int64_t threads = std::min<int64_t>(128, (vectors + kWarpSize - 1) / kWarpSize * kWarpSize);
    const dim3 grid(unsigned((vectors + threads - 1) / threads), unsigned(call.parts));
    device.launch(columns_grad_kernel<T, kAligned>, {grid, unsigned(threads)}, call);
  }
  const dim3 grid(unsigned((call.width + kWarpSize - 1) / kWarpSize), 2), block(kWarpSize, kSumRows);
  device.launch(sum_parts_kernel<T, typename Backward<T>::A>, {grid, block}, call.partial, grad_weight, grad_bias,
                call.parts, call.width);
}

}  // namespace
}  // namespace arr_coc
