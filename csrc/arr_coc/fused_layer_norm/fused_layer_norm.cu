#include <torch/csrc/stable/library.h>

#include "arr_coc/common/held_rows.cuh"
#include "arr_coc/fused_layer_norm/fused_layer_norm.h"
#include "arr_coc/fused_layer_norm/gradient.cuh"

namespace arr_coc {
namespace {

// Computes mean and variance without losing digits to a mean far from 0. Every thread sums differences from its first
// element. The threads' means are differences from the row's first element, which are exact if they are small.
template <class T>
class RowMoments {
 public:
  using A = accumulate_t<T>;

  __device__ RowMoments(const T* row, int lane, int64_t width)
      : pivot_(A(row[0])), own_(lane * kVector<T> < width ? A(row[lane * kVector<T>]) : pivot_) {}

  template <bool kAligned>
  __device__ void add(const A (&values)[kVector<T>], int64_t at, int64_t width) {
    if (kAligned && at >= width) return;
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      const A difference = kAligned || at + j < width ? values[j] - own_ : A(0);
      sum_ += difference;
      squares_ += difference * difference;
    }
    count_ += kAligned ? kVector<T> : int(min(int64_t(kVector<T>), max(int64_t(0), width - at)));
  }

  template <bool kBlock>
  __device__ void finish(const RowGroup<kBlock>& group, int64_t width, A eps) {
    __shared__ A shared[2][kRowThreads / kWarpSize][1];
    const A count = A(count_), mean = count_ ? sum_ / count : A(0), from_pivot = own_ - pivot_ + mean;
    A value[1] = {count * from_pivot};
    group.combine(value, shared[0], A(0), Sum<A>());
    shift_ = value[0] / A(width);
    const A away = from_pivot - shift_;
    value[0] = squares_ - sum_ * mean + count * away * away;
    group.combine(value, shared[1], A(0), Sum<A>());
    const A variance = value[0] / A(width);
    rstd = 1 / sqrt((variance < 0 ? A(0) : variance) + eps);
    mean_ = pivot_ + shift_;
  }

  __device__ uint4 normalised(const A (&values)[kVector<T>], const uint4& weight, const uint4& bias) const {
    A weights[kVector<T>], biases[kVector<T>], y[kVector<T>];
    unpack<T>(weight, weights);
    unpack<T>(bias, biases);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) y[j] = (values[j] - pivot_ - shift_) * rstd * weights[j] + biases[j];
    return pack<T>(y);
  }

  __device__ A mean() const { return mean_; }
  A rstd;

 private:
  A pivot_, own_, sum_ = 0, squares_ = 0, shift_, mean_;
  int count_ = 0;
};

template <class T, int kVectors, bool kBlock, bool kAligned>
__global__ void __launch_bounds__(kBlock ? kRowThreads : kRowWarps* kWarpSize) held_rows_kernel(LayerNorm<T> call) {
  using A = accumulate_t<T>;
  const RowGroup<kBlock> group;
  for (int64_t row = group.first; row < call.rows; row += group.stride) {
    const T* in = call.x + row * call.width;
    RowMoments<T> moments(in, group.lane, call.width);
    uint4 x[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) x[i] = load_vector<kAligned>(in, group.template at<T>(i), call.width);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A values[kVector<T>];
      unpack<T>(x[i], values);
      moments.template add<kAligned>(values, group.template at<T>(i), call.width);
    }
    moments.finish(group, call.width, call.eps);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = group.template at<T>(i);
      A values[kVector<T>];
      keep_packed(x[i]);
      unpack<T>(x[i], values);
      store_vector<kAligned>(call.y + row * call.width, at, call.width,
                             moments.normalised(values, load_vector<kAligned>(call.weight, at, call.width),
                                                load_vector<kAligned>(call.bias, at, call.width)));
    }
    if (group.lane == 0) call.mean[row] = moments.mean(), call.rstd[row] = moments.rstd;
  }
}

// Rows too long for the registers of a block are read twice, the second time mostly from the L2 cache.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads) long_rows_kernel(LayerNorm<T> call) {
  using A = accumulate_t<T>;
  const RowGroup<true> group;
  const int step = group.size * kVector<T>;
  for (int64_t row = group.first; row < call.rows; row += group.stride) {
    const T* in = call.x + row * call.width;
    RowMoments<T> moments(in, group.lane, call.width);
    A values[kVector<T>];
#pragma unroll 4
    for (int64_t at = group.template at<T>(0); at < call.width; at += step) {
      unpack<T>(load_vector<kAligned>(in, at, call.width), values);
      moments.template add<kAligned>(values, at, call.width);
    }
    moments.finish(group, call.width, call.eps);
#pragma unroll 4
    for (int64_t at = group.template at<T>(0); at < call.width; at += step) {
      unpack<T>(load_vector<kAligned>(in, at, call.width), values);
      store_vector<kAligned>(call.y + row * call.width, at, call.width,
                             moments.normalised(values, load_vector<kAligned>(call.weight, at, call.width),
                                                load_vector<kAligned>(call.bias, at, call.width)));
    }
    if (group.lane == 0) call.mean[row] = moments.mean(), call.rstd[row] = moments.rstd;
  }
}

template <class T, bool kAligned>
void launch(const LayerNorm<T>& call, const Cuda& device) {
  const bool held = for_held_rows<T>(call.width, kRowThreads, [&](auto vectors, auto is_block, unsigned threads) {
    const unsigned blocks = grid_size(call.rows, is_block ? 1 : kRowWarps);
    device.launch(held_rows_kernel<T, vectors, is_block, kAligned>, {blocks, threads}, call);
  });
  if (!held) device.launch(long_rows_kernel<T, kAligned>, {grid_size(call.rows, 1), kRowThreads}, call);
}

}  // namespace

template <class T>
void run(const Cuda& device, const LayerNorm<T>& call) {
  const bool aligned = has_whole_vectors(call.x, call.width) && has_whole_vectors(call.weight, call.width) &&
                       has_whole_vectors(call.bias, call.width);
  aligned ? launch<T, true>(call, device) : launch<T, false>(call, device);
}

template <class T>
void run(const Cuda& device, const LayerNormGrad<T>& call) {
  const auto [grad, x, weight, mean, rstd, grad_x, grad_weight, grad_bias, rows, width] = call;
  const int64_t parts = parts_of<T>(rows, width);
  const bool columns = grad_weight || grad_bias;
  Scratch<accumulate_t<T>> partial(device, columns ? 2 * parts * width : 0);
  const Backward<T> backward{grad, x, weight, mean, rstd, grad_x, partial.data(), rows, width, parts};
  const bool aligned =
      has_whole_vectors(x, width) && has_whole_vectors(grad, width) && has_whole_vectors(weight, width);
  aligned ? launch_grad<T, true>(backward, grad_weight, grad_bias, device)
          : launch_grad<T, false>(backward, grad_weight, grad_bias, device);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("fused_layer_norm", TORCH_BOX(&fused_layer_norm<Cuda>));
  m.impl("fused_layer_norm_grad", TORCH_BOX(&fused_layer_norm_grad<Cuda>));
}

}  // namespace arr_coc
