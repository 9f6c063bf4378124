#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/held_rows.cuh"
#include "ops/fused_layer_norm/fused_layer_norm.h"
#include "ops/fused_layer_norm/gradient.cuh"

namespace arr_coc {
namespace {

template <class T>
struct Forward {
  using A = accumulate_t<T>;
  const T *x, *weight, *bias;
  T* y;
  A *mean, *rstd;
  int64_t rows, width;
  A eps;
};

// Mean and variance without losing digits to a mean far from 0. Every thread sums the differences from the first of its
// own elements, which cannot be much further from its mean than they differ; the threads' means are told as
// differences from the first of the row, exact where they are small.
template <class T>
class RowMoments {
 public:
  using A = accumulate_t<T>;

  RowMoments() = default;
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

  // What the group adds up for the mean, then with the mean for the variance.
  __device__ A total() {
    own_mean_ = count_ ? sum_ / A(count_) : A(0);
    away_ = own_ - pivot_ + own_mean_;
    return A(count_) * away_;
  }
  __device__ A squares(A total, int64_t width) {
    shift_ = total / A(width);
    mean_ = pivot_ + shift_;
    away_ -= shift_;
    return squares_ - sum_ * own_mean_ + A(count_) * away_ * away_;
  }
  __device__ void finish(A squares, int64_t width, A eps) {
    const A variance = squares / A(width);
    rstd = 1 / sqrt((variance < 0 ? A(0) : variance) + eps);
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
  A pivot_, own_, sum_ = 0, squares_ = 0, own_mean_, away_, shift_, mean_;
  int count_ = 0;
};

template <int kRows, bool kBlock, class T, class A>
__device__ __forceinline__ void finish(const RowGroup<kBlock>& group, int64_t width, A eps,
                                       RowMoments<T> (&moments)[kRows]) {
  __shared__ A shared[2][kRowThreads / kWarpSize][kRows];
  A values[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) values[k] = moments[k].total();
  group.combine(values, shared[0], A(0), Sum<A>());
#pragma unroll
  for (int k = 0; k < kRows; ++k) values[k] = moments[k].squares(values[k], width);
  group.combine(values, shared[1], A(0), Sum<A>());
#pragma unroll
  for (int k = 0; k < kRows; ++k) moments[k].finish(values[k], width, eps);
}

// Rows a group takes at once: a warp takes more narrow ones, to have as many loads in flight.
template <int kVectors, bool kBlock>
constexpr int kRowsAtOnce = kBlock ? 1 : kMostVectors / kVectors;

template <class T, int kVectors, bool kBlock, bool kAligned>
__global__ void __launch_bounds__(kBlock ? kRowThreads : kRowWarps* kWarpSize) held_rows_kernel(Forward<T> call) {
  using A = accumulate_t<T>;
  constexpr int kRows = kRowsAtOnce<kVectors, kBlock>;
  const RowGroup<kBlock> group;
  for (int64_t first = group.first * kRows; first < call.rows; first += group.stride * kRows) {
    RowMoments<T> moments[kRows];
    uint4 x[kRows][kVectors];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const T* in = call.x + min(first + k, call.rows - 1) * call.width;
      moments[k] = RowMoments<T>(in, group.lane, call.width);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) x[k][i] = load_vector<kAligned>(in, group.template at<T>(i), call.width);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        A values[kVector<T>];
        unpack<T>(x[k][i], values);
        moments[k].template add<kAligned>(values, group.template at<T>(i), call.width);
      }
    }
    finish(group, call.width, call.eps, moments);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = group.template at<T>(i);
      const uint4 weight = load_vector<kAligned>(call.weight, at, call.width),
                  bias = load_vector<kAligned>(call.bias, at, call.width);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (first + k >= call.rows) break;
        A values[kVector<T>];
        keep_packed(x[k][i]);
        unpack<T>(x[k][i], values);
        store_vector<kAligned>(call.y + (first + k) * call.width, at, call.width,
                               moments[k].normalised(values, weight, bias));
      }
    }
    if (group.lane != 0) continue;
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      if (first + k < call.rows) call.mean[first + k] = moments[k].mean(), call.rstd[first + k] = moments[k].rstd;
  }
}

// Rows too long for the registers of a block are read twice, the second time mostly from the L2 cache.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads) long_rows_kernel(Forward<T> call) {
  using A = accumulate_t<T>;
  const RowGroup<true> group;
  const int step = group.size * kVector<T>;
  for (int64_t row = group.first; row < call.rows; row += group.stride) {
    const T* in = call.x + row * call.width;
    RowMoments<T> moments[1] = {{in, group.lane, call.width}};
    A values[kVector<T>];
#pragma unroll 4
    for (int64_t at = group.template at<T>(0); at < call.width; at += step) {
      unpack<T>(load_vector<kAligned>(in, at, call.width), values);
      moments[0].template add<kAligned>(values, at, call.width);
    }
    finish(group, call.width, call.eps, moments);
#pragma unroll 4
    for (int64_t at = group.template at<T>(0); at < call.width; at += step) {
      unpack<T>(load_vector<kAligned>(in, at, call.width), values);
      store_vector<kAligned>(call.y + row * call.width, at, call.width,
                             moments[0].normalised(values, load_vector<kAligned>(call.weight, at, call.width),
                                                   load_vector<kAligned>(call.bias, at, call.width)));
    }
    if (group.lane == 0) call.mean[row] = moments[0].mean(), call.rstd[row] = moments[0].rstd;
  }
}

template <class T, bool kAligned>
void launch(const Forward<T>& call, cudaStream_t stream) {
  const bool held = for_held_rows<T>(call.width, kRowThreads, [&](auto vectors, auto is_block, unsigned threads) {
    constexpr bool kBlock = decltype(is_block)::value;
    constexpr int kVectors = decltype(vectors)::value;
    const unsigned blocks = grid_size(call.rows, kBlock ? 1 : kRowWarps * kRowsAtOnce<kVectors, kBlock>);
    held_rows_kernel<T, kVectors, kBlock, kAligned><<<blocks, threads, 0, stream>>>(call);
  });
  if (!held) long_rows_kernel<T, kAligned><<<grid_size(call.rows, 1), kRowThreads, 0, stream>>>(call);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor, Tensor> fused_layer_norm_cuda(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                         double eps) {
  check_fused_layer_norm(x, weight, bias, eps);
  const CudaScope scope(x);
  const Tensor input = torch::stable::contiguous(x), weights = torch::stable::contiguous(weight),
               biases = torch::stable::contiguous(bias);
  const auto sizes = input.sizes(), rows = sizes.slice(0, sizes.size() - 1);
  const int64_t width = x.size(-1);
  const ScalarType wide = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  Tensor y = torch::stable::new_empty(input, sizes), mean = torch::stable::new_empty(input, rows, wide),
         rstd = torch::stable::new_empty(input, rows, wide);
  if (input.numel() == 0) return {y, mean, rstd};
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const Forward<T> call{static_cast<const T*>(input.const_data_ptr()),
                          static_cast<const T*>(weights.const_data_ptr()),
                          static_cast<const T*>(biases.const_data_ptr()),
                          static_cast<T*>(y.mutable_data_ptr()),
                          static_cast<A*>(mean.mutable_data_ptr()),
                          static_cast<A*>(rstd.mutable_data_ptr()),
                          input.numel() / width,
                          width,
                          A(eps)};
    if (has_whole_vectors(call.x, width) && has_whole_vectors(call.weight, width) &&
        has_whole_vectors(call.bias, width)) {
      launch<T, true>(call, scope.stream());
    } else {
      launch<T, false>(call, scope.stream());
    }
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> fused_layer_norm_grad_cuda(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                              const Tensor& mean, const Tensor& rstd, bool need_x,
                                                              bool need_weight, bool need_bias) {
  check_fused_layer_norm_grad(grad, x, weight, mean, rstd);
  const CudaScope scope(x);
  const Tensor upstream = torch::stable::contiguous(grad), input = torch::stable::contiguous(x),
               weights = torch::stable::contiguous(weight), means = torch::stable::contiguous(mean),
               rstds = torch::stable::contiguous(rstd);
  const int64_t width = x.size(-1), rows = input.numel() / width;
  const std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end()), column{width}, nothing{0};
  Tensor grad_x = torch::stable::new_empty(input, need_x ? sizes : nothing),
         grad_weight = torch::stable::new_empty(input, need_weight ? column : nothing),
         grad_bias = torch::stable::new_empty(input, need_bias ? column : nothing);
  if (rows == 0) {
    if (need_weight) torch::stable::zero_(grad_weight);
    if (need_bias) torch::stable::zero_(grad_bias);
    return {grad_x, grad_weight, grad_bias};
  }
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t parts = parts_of<T>(rows, width);
    const bool columns = need_weight || need_bias;
    Tensor partial = torch::stable::new_empty(means, {columns ? 2 * parts * width : 0});
    const Backward<T> call{static_cast<const T*>(upstream.const_data_ptr()),
                           static_cast<const T*>(input.const_data_ptr()),
                           static_cast<const T*>(weights.const_data_ptr()),
                           static_cast<const A*>(means.const_data_ptr()),
                           static_cast<const A*>(rstds.const_data_ptr()),
                           need_x ? static_cast<T*>(grad_x.mutable_data_ptr()) : nullptr,
                           columns ? static_cast<A*>(partial.mutable_data_ptr()) : nullptr,
                           rows,
                           width,
                           parts};
    T* of_weight = need_weight ? static_cast<T*>(grad_weight.mutable_data_ptr()) : nullptr;
    T* of_bias = need_bias ? static_cast<T*>(grad_bias.mutable_data_ptr()) : nullptr;
    if (has_whole_vectors(call.x, width) && has_whole_vectors(call.grad, width) &&
        has_whole_vectors(call.weight, width)) {
      launch_grad<T, true>(call, of_weight, of_bias, scope.stream());
    } else {
      launch_grad<T, false>(call, of_weight, of_bias, scope.stream());
    }
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("fused_layer_norm", TORCH_BOX(&fused_layer_norm_cuda));
  m.impl("fused_layer_norm_grad", TORCH_BOX(&fused_layer_norm_grad_cuda));
}

}  // namespace arr_coc
