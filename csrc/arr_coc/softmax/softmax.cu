#include <torch/csrc/stable/library.h>

#include "arr_coc/common/vectors.cuh"
#include "arr_coc/softmax/softmax.h"

namespace arr_coc {
namespace {

// Rows of up to kWarpSize * kFew elements share a block; longer rows have their own block. Up to this length, a thread
// holds its elements in registers. Longer rows are read twice, the second time mostly from the second cache.
constexpr int kFew = 16;
template <class T>
constexpr int kMany = 128 / sizeof(accumulate_t<T>);
constexpr int kFewThreads = 256, kManyThreads = 512, kLongThreads = 512;
constexpr int kSharingThreads = 128;

// The error of the hardware's power of two does not matter if the result is rounded to half precision.
template <class T>
__device__ __forceinline__ accumulate_t<T> exponential(accumulate_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    return power_of_two(x * 1.4426950408889634f);
  } else {
    return exp(x);
  }
}

// kPer elements from row[at] on: a vector, or one element if rows do not start on 16 bytes. A thread's elements depend
// on the width alone. They stay packed until all of a thread's loads have started.
template <int kPer, class T>
using Stored = std::conditional_t<kPer == 1, T, uint4>;

template <int kPer, class T>
__device__ __forceinline__ Stored<kPer, T> load(const T* row, int64_t at, int64_t width) {
  Stored<kPer, T> stored{};
  if (at < width) stored = *reinterpret_cast<const Stored<kPer, T>*>(row + at);
  return stored;
}

template <int kPer, class T, class A>
__device__ __forceinline__ void widen(const Stored<kPer, T>& stored, A (&values)[kPer]) {
  if constexpr (kPer == 1) {
    values[0] = A(stored);
  } else {
    unpack<T>(stored, values);
  }
}

// The same with `outside` from `width` on.
template <int kPer, class T, class A>
__device__ __forceinline__ void widen(const Stored<kPer, T>& stored, bool inside, A outside, A (&values)[kPer]) {
  widen<kPer, T>(stored, values);
#pragma unroll
  for (int i = 0; i < kPer; ++i) values[i] = inside ? values[i] : outside;
}

template <int kPer, class T, class A>
__device__ __forceinline__ void store(T* row, int64_t at, int64_t width, const A (&values)[kPer]) {
  if (at >= width) return;
  if constexpr (kPer == 1) {
    row[at] = T(values[0]);
  } else {
    *reinterpret_cast<uint4*>(row + at) = pack<T>(values);
  }
}

struct Sum {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
};
// NaN is ignored, but reaches the sum of the exponentials.
struct Greatest {
  template <class A>
  __device__ A operator()(A a, A b) const {
    return max(a, b);
  }
};

// The threads of a row: the whole block, or `size` neighbours in a warp, a power of two.
template <bool kBlock>
struct Row {
  int64_t row;
  int lane, size;

  __device__ explicit Row(int sharing)
      : row(kBlock ? blockIdx.x : int64_t(blockIdx.x) * (blockDim.x / sharing) + threadIdx.x / sharing),
        lane(kBlock ? threadIdx.x : threadIdx.x % sharing),
        size(kBlock ? blockDim.x : sharing) {}

  // The start of the thread's piece k.
  template <int kPer>
  __device__ int at(int k) const {
    return (k * size + lane) * kPer;
  }

  template <class A, class F>
  __device__ __forceinline__ A combine(A value, A neutral, const F& f) const {
    for (int offset = (kBlock ? kWarpSize : size) / 2; offset > 0; offset /= 2)
      value = f(value, __shfl_xor_sync(0xffffffffu, value, offset));
    if constexpr (kBlock) {
      __shared__ A shared[kWarpSize];
      const int warp = threadIdx.x / kWarpSize, slot = threadIdx.x % kWarpSize;
      __syncthreads();  // an earlier call's values have been read
      if (slot == 0) shared[warp] = value;
      __syncthreads();
      value = slot < size / kWarpSize ? shared[slot] : neutral;
#pragma unroll
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
        value = f(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
  }
};

template <bool kBlock, int kPer, int kElements, class T>
__global__ void __launch_bounds__(kBlock ? (kElements == kFew && sizeof(T) < 8 ? kFewThreads : kManyThreads)
                                         : kSharingThreads)
    softmax_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t rows, int64_t width, int sharing) {
  using A = accumulate_t<T>;
  constexpr int kPieces = kElements / kPer;
  const Row<kBlock> group(sharing);
  const int inside = group.row < rows ? int(width) : 0;  // every lane of a warp takes part in the exchanges
  const T* in = x + group.row * width;
  A values[kPieces][kPer], most = -INFINITY, sum = 0;
  Stored<kPer, T> stored[kPieces];
#pragma unroll
  for (int k = 0; k < kPieces; ++k) stored[k] = load<kPer>(in, group.template at<kPer>(k), inside);
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    widen<kPer, T>(stored[k], group.template at<kPer>(k) < inside, A(-INFINITY), values[k]);
#pragma unroll
    for (int i = 0; i < kPer; ++i) most = max(most, values[k][i]);
  }
  most = group.combine(most, A(-INFINITY), Greatest{});
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      values[k][i] = exponential<T>(values[k][i] - most);
      sum += values[k][i];
    }
  }
  const A factor = 1 / group.combine(sum, A(0), Sum{});
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) values[k][i] *= factor;
    store<kPer>(out + group.row * width, group.template at<kPer>(k), inside, values[k]);
  }
}

// With y the output: y (grad - sum of grad y).
template <bool kBlock, int kPer, int kElements, class T>
__global__ void __launch_bounds__(kBlock ? (kElements == kFew && sizeof(T) < 8 ? kFewThreads : kManyThreads)
                                         : kSharingThreads)
    softmax_grad_kernel(const T* __restrict__ grad, const T* __restrict__ output, T* __restrict__ out, int64_t rows,
                        int64_t width, int sharing) {
  using A = accumulate_t<T>;
  constexpr int kPieces = kElements / kPer;
  const Row<kBlock> group(sharing);
  const int inside = group.row < rows ? int(width) : 0;
  const int64_t start = group.row * width;
  Stored<kPer, T> stored_grad[kPieces], stored_y[kPieces];
  A upstream[kPieces][kPer], y[kPieces][kPer], sum = 0;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    stored_grad[k] = load<kPer>(grad + start, group.template at<kPer>(k), inside);
    stored_y[k] = load<kPer>(output + start, group.template at<kPer>(k), inside);
  }
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    widen<kPer, T>(stored_grad[k], upstream[k]);
    widen<kPer, T>(stored_y[k], y[k]);
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += upstream[k][i] * y[k][i];
  }
  sum = group.combine(sum, A(0), Sum{});
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) y[k][i] *= upstream[k][i] - sum;
    store<kPer>(out + start, group.template at<kPer>(k), inside, y[k]);
  }
}

// Each thread keeps the greatest element so far and the sum of exponentials relative to it. The initial value is
// finite, so that a thread with only -inf adds nothing; a row of only -inf has a sum of 0 and becomes NaN.
template <int kPer, class T>
__global__ void __launch_bounds__(kLongThreads)
    long_softmax_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t width) {
  using A = accumulate_t<T>;
  constexpr int kPieces = kFew / kPer;

  const Row<true> group(kLongThreads);
  const T* in = x + group.row * width;
  A most = kLeast<A>, sum = 0;
  for (int64_t start = 0; start < width; start += kLongThreads * kFew) {
    Stored<kPer, T> stored[kPieces];
    A values[kPieces][kPer], higher = most;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) stored[k] = load<kPer>(in, start + group.template at<kPer>(k), width);
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      widen<kPer, T>(stored[k], start + group.template at<kPer>(k) < width, A(-INFINITY), values[k]);
#pragma unroll
      for (int i = 0; i < kPer; ++i) higher = max(higher, values[k][i]);
    }
    sum *= exponential<T>(most - higher);
    most = higher;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) sum += exponential<T>(values[k][i] - most);
    }
  }
  const A over_row = group.combine(most, kLeast<A>, Greatest{});
  const A factor = 1 / group.combine(sum * exponential<T>(most - over_row), A(0), Sum{});
#pragma unroll 4
  for (int64_t at = group.lane * kPer; at < width; at += kLongThreads * kPer) {
    A values[kPer];
    widen<kPer, T>(load<kPer>(in, at, width), values);
#pragma unroll
    for (int i = 0; i < kPer; ++i) values[i] = exponential<T>(values[i] - over_row) * factor;
    store<kPer>(out + group.row * width, at, width, values);
  }
}

template <int kPer, class T>
__global__ void __launch_bounds__(kLongThreads)
    long_softmax_grad_kernel(const T* __restrict__ grad, const T* __restrict__ output, T* __restrict__ out,
                             int64_t width) {
  using A = accumulate_t<T>;
  const Row<true> group(kLongThreads);
  const int64_t row = group.row * width;
  A sum = 0;
#pragma unroll 4
  for (int64_t at = group.lane * kPer; at < width; at += kLongThreads * kPer) {
    A upstream[kPer], y[kPer];
    widen<kPer, T>(load<kPer>(grad + row, at, width), upstream);
    widen<kPer, T>(load<kPer>(output + row, at, width), y);
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += upstream[i] * y[i];
  }
  sum = group.combine(sum, A(0), Sum{});
#pragma unroll 4
  for (int64_t at = group.lane * kPer; at < width; at += kLongThreads * kPer) {
    A upstream[kPer], y[kPer];
    widen<kPer, T>(load<kPer>(grad + row, at, width), upstream);
    widen<kPer, T>(load<kPer>(output + row, at, width), y);
#pragma unroll
    for (int i = 0; i < kPer; ++i) y[i] *= upstream[i] - sum;
    store<kPer>(out + row, at, width, y);
  }
}

// The blocks and threads of rows. The threads of a row depend on the width alone, so that a row has the same bits in
// any batch.
template <class T>
struct RowLaunch {
  int64_t rows, width;
  int sharing = 1;

  RowLaunch(int64_t rows, int64_t width) : rows(rows), width(width) {
    while (sharing < kWarpSize && sharing * kFew < width) sharing *= 2;
  }
  bool share_a_block() const { return width <= kWarpSize * kFew; }
  bool few() const { return width <= kFewThreads * kFew; }
  bool many() const { return width <= kManyThreads * kMany<T>; }

  Grid grid() const {
    if (share_a_block()) return {grid_size(rows, kSharingThreads / sharing, INT32_MAX), kSharingThreads};
    // Whole warps, each thread with up to so many of the row's elements.
    const int elements = few() ? kFew : kMany<T>;
    const unsigned threads = many() ? grid_size(width, elements * kWarpSize) * kWarpSize : kLongThreads;
    return {grid_size(rows, 1, INT32_MAX), threads};
  }
};

template <int kPer, class T>
void launch_softmax(const Cuda& device, const RowLaunch<T>& of, const T* x, T* out) {
  const auto kernel = of.share_a_block() ? softmax_kernel<false, kPer, kFew, T>
                      : of.few()         ? softmax_kernel<true, kPer, kFew, T>
                                         : softmax_kernel<true, kPer, kMany<T>, T>;
  if (!of.many()) return device.launch(long_softmax_kernel<kPer, T>, of.grid(), x, out, of.width);
  device.launch(kernel, of.grid(), x, out, of.rows, of.width, of.sharing);
}

template <int kPer, class T>
void launch_softmax_grad(const Cuda& device, const RowLaunch<T>& of, const T* grad, const T* output, T* out) {
  const auto kernel = of.share_a_block() ? softmax_grad_kernel<false, kPer, kFew, T>
                      : of.few()         ? softmax_grad_kernel<true, kPer, kFew, T>
                                         : softmax_grad_kernel<true, kPer, kMany<T>, T>;
  if (!of.many()) return device.launch(long_softmax_grad_kernel<kPer, T>, of.grid(), grad, output, out, of.width);
  device.launch(kernel, of.grid(), grad, output, out, of.rows, of.width, of.sharing);
}

}  // namespace

template <class T>
void run(const Cuda& device, const Softmax<T>& call) {
  const RowLaunch<T> launch(call.rows, call.width);
  const AlignedData<T> x(device, call.x, call.rows * call.width);
  const auto start = call.width % kVector<T> == 0 ? launch_softmax<kVector<T>, T> : launch_softmax<1, T>;
  start(device, launch, x.data(), call.out);
}

template <class T>
void run(const Cuda& device, const SoftmaxGrad<T>& call) {
  const RowLaunch<T> launch(call.rows, call.width);
  const int64_t size = call.rows * call.width;
  const AlignedData<T> grad(device, call.grad, size), output(device, call.output, size);
  const auto start = call.width % kVector<T> == 0 ? launch_softmax_grad<kVector<T>, T> : launch_softmax_grad<1, T>;
  start(device, launch, grad.data(), output.data(), call.out);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("softmax", TORCH_BOX(&softmax<Cuda>));
  m.impl("softmax_grad", TORCH_BOX(&softmax_grad<Cuda>));
}

}  // namespace arr_coc
