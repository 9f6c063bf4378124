#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/cuda.cuh"
#include "ops/opponent_balance/opponent_balance.h"

namespace arr_coc {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// One sample's weights. See opponent_balance.cpp for the formulas.
template <class A>
struct Balance {
  A c, p, f, sum;

  template <class T>
  __device__ explicit Balance(const T* weights) : c(weights[0]), p(weights[1]), f(weights[2]), sum(c + p + f) {}

  __device__ A operator()(A e, A s, A a) const { return (c * e + p * s + f * a) / sum; }
};

// kVector elements, 16 bytes where they are more than one: they then divide a sample, and the addresses allow it.
template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T value[kVector];
};

template <class T, int kVector>
__global__ void balance_kernel(const T* entropy, const T* salience, const T* alignment, const T* weights, T* out,
                               int64_t total, int64_t count, int64_t weight_stride, bool invert) {
  using A = accumulate_t<T>;
  using V = Vector<T, kVector>;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total / kVector;
       i += int64_t(gridDim.x) * kThreads) {
    const V e = reinterpret_cast<const V*>(entropy)[i], s = reinterpret_cast<const V*>(salience)[i],
            a = reinterpret_cast<const V*>(alignment)[i];
    const Balance<A> balance(weights + (weight_stride ? i * kVector / count * weight_stride : 0));
    V result;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const A raw = balance(invert ? 1 - A(e.value[j]) : A(e.value[j]), A(s.value[j]), A(a.value[j]));
      result.value[j] = T(raw < 0 ? A(0) : raw > 1 ? A(1) : raw);  // NaN stays, as in torch.clamp
    }
    reinterpret_cast<V*>(out)[i] = result;
  }
}

// One block per chunk of a sample, kVector neighbours per thread. The order of sums does not depend on kWide, which
// says whether they can be read at once. Null outputs are not computed. `partial` is [B, chunks, 3], or the weights'
// gradient itself if that is the sum of one chunk.
template <int kVector, bool kWide, class T, class Partial>
__global__ void balance_grad_kernel(const T* grad, const T* entropy, const T* salience, const T* alignment,
                                    const T* weights, T* grad_entropy, T* grad_salience, T* grad_alignment,
                                    Partial* partial, int64_t batch, int64_t count, int64_t chunks,
                                    int64_t weight_stride, bool invert) {
  using A = accumulate_t<T>;
  using V = Vector<T, kVector>;
  __shared__ A shared[kWarps];
  for (int64_t item = blockIdx.x; item < batch * chunks; item += gridDim.x) {
    const int64_t sample = item / chunks, begin = item % chunks * kBalanceChunk;
    const int64_t base = sample * count, end = min(begin + kBalanceChunk, count);
    const Balance<A> balance(weights + sample * weight_stride);
    A sum_c = 0, sum_p = 0, sum_f = 0;
    for (int64_t i = base + begin + threadIdx.x * kVector; i < base + end; i += kThreads * kVector) {
      const auto load = [&](const T* tensor) {
        if (kWide) return *reinterpret_cast<const V*>(tensor + i);
        V vector = {};
        for (int j = 0; j < kVector && i + j < base + end; ++j) vector.value[j] = tensor[i + j];
        return vector;
      };
      const auto store = [&](T* tensor, const V& vector) {
        if (!tensor) return;
        if (kWide) {
          *reinterpret_cast<V*>(tensor + i) = vector;
        } else {
          for (int j = 0; j < kVector && i + j < base + end; ++j) tensor[i + j] = vector.value[j];
        }
      };
      const V g = load(grad), e = load(entropy), s = load(salience), a = load(alignment);
      V of_e, of_s, of_a;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (!kWide && i + j >= base + end) continue;
        const A x = invert ? 1 - A(e.value[j]) : A(e.value[j]), y = A(s.value[j]), z = A(a.value[j]);
        const A raw = balance(x, y, z), slope = (raw >= 0 && raw <= 1 ? A(g.value[j]) : A(0)) / balance.sum;
        of_e.value[j] = T(invert ? -slope * balance.c : slope * balance.c);
        of_s.value[j] = T(slope * balance.p);
        of_a.value[j] = T(slope * balance.f);
        sum_c += slope * (x - raw);
        sum_p += slope * (y - raw);
        sum_f += slope * (z - raw);
      }
      store(grad_entropy, of_e);
      store(grad_salience, of_s);
      store(grad_alignment, of_a);
    }
    if (!partial) continue;  // the same for the whole grid
    sum_c = block_sum(sum_c, shared);
    sum_p = block_sum(sum_p, shared);
    sum_f = block_sum(sum_f, shared);
    if (threadIdx.x == 0) {
      partial[item * 3] = Partial(sum_c);
      partial[item * 3 + 1] = Partial(sum_p);
      partial[item * 3 + 2] = Partial(sum_f);
    }
  }
}

// One block per row of weights computes the sum of `per_row` partial sums.
template <class T>
__global__ void weights_grad_kernel(const accumulate_t<T>* partial, T* grad_weights, int64_t rows, int64_t per_row) {
  using A = accumulate_t<T>;
  __shared__ A shared[kWarps];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int k = 0; k < 3; ++k) {
      A sum = 0;
      for (int64_t item = threadIdx.x; item < per_row; item += kThreads) sum += partial[(row * per_row + item) * 3 + k];
      sum = block_sum(sum, shared);
      if (threadIdx.x == 0) grad_weights[row * 3 + k] = T(sum);
    }
  }
}

// Whether 16-byte vectors of kVector elements divide the samples of all these tensors.
template <int kVector>
bool in_vectors(int64_t count, std::initializer_list<const Tensor*> tensors) {
  bool aligned = count % kVector == 0;
  for (const Tensor* tensor : tensors) aligned &= reinterpret_cast<uintptr_t>(tensor->const_data_ptr()) % 16 == 0;
  return aligned;
}

Tensor opponent_balance_cuda(const Tensor& entropy, const Tensor& salience, const Tensor& alignment,
                             const Tensor& weights, bool invert_entropy) {
  check_opponent_balance(entropy, salience, alignment, weights);
  const CudaScope scope(entropy);
  const Tensor e = as_contiguous(entropy), s = as_contiguous(salience), a = as_contiguous(alignment),
               w = as_contiguous(weights);
  const int64_t batch = e.size(0), count = e.size(1), total = batch * count;
  Tensor scores = allocate(e, {batch, count});
  if (total == 0) return scores;
  dispatch_floating(e.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    constexpr int kVector = 16 / sizeof(T);
    const bool wide = in_vectors<kVector>(count, {&e, &s, &a, &scores});
    const auto kernel = wide ? balance_kernel<T, kVector> : balance_kernel<T, 1>;
    kernel<<<grid_size(total, kThreads * (wide ? kVector : 1)), kThreads, 0, scope.stream()>>>(
        static_cast<const T*>(e.const_data_ptr()), static_cast<const T*>(s.const_data_ptr()),
        static_cast<const T*>(a.const_data_ptr()), static_cast<const T*>(w.const_data_ptr()),
        static_cast<T*>(scores.mutable_data_ptr()), total, count, w.dim() == 2 ? 3 : 0, invert_entropy);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return scores;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> opponent_balance_grad_cuda(const Tensor& grad, const Tensor& entropy,
                                                                      const Tensor& salience, const Tensor& alignment,
                                                                      const Tensor& weights, bool invert_entropy,
                                                                      bool need_entropy, bool need_salience,
                                                                      bool need_alignment, bool need_weights) {
  check_opponent_balance_grad(grad, entropy, salience, alignment, weights);
  const CudaScope scope(entropy);
  const Tensor g = as_contiguous(grad), e = as_contiguous(entropy), s = as_contiguous(salience),
               a = as_contiguous(alignment), w = as_contiguous(weights);
  const int64_t batch = e.size(0), count = e.size(1), chunks = (count + kBalanceChunk - 1) / kBalanceChunk;
  const int64_t weight_stride = w.dim() == 2 ? 3 : 0;
  const auto scores_or_nothing = [&](bool needed) { return needed ? allocate(e, {batch, count}) : allocate(e, {0}); };
  Tensor grad_e = scores_or_nothing(need_entropy), grad_s = scores_or_nothing(need_salience),
         grad_a = scores_or_nothing(need_alignment);
  Tensor grad_w = need_weights ? allocate(w, w.sizes()) : allocate(w, {0});
  if (batch * count == 0) {
    if (need_weights && grad_w.numel() > 0) torch::stable::zero_(grad_w);
    return {grad_e, grad_s, grad_a, grad_w};
  }
  dispatch_floating(e.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    constexpr auto kPartial = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
    const auto output = [](Tensor& tensor, bool needed) {
      return needed ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
    };
    constexpr int kVector = 16 / sizeof(T);
    const bool wide = in_vectors<kVector>(count, {&g, &e, &s, &a, &grad_e, &grad_s, &grad_a});
    const auto launch = [&](auto* partial) {
      using Partial = std::remove_pointer_t<decltype(partial)>;
      // Few elements are distributed one by one, so that more threads have work.
      const auto kernel = count < kThreads * kVector ? balance_grad_kernel<1, true, T, Partial>
                          : wide                     ? balance_grad_kernel<kVector, true, T, Partial>
                                                     : balance_grad_kernel<kVector, false, T, Partial>;
      kernel<<<grid_size(batch * chunks, 1), kThreads, 0, scope.stream()>>>(
          static_cast<const T*>(g.const_data_ptr()), static_cast<const T*>(e.const_data_ptr()),
          static_cast<const T*>(s.const_data_ptr()), static_cast<const T*>(a.const_data_ptr()),
          static_cast<const T*>(w.const_data_ptr()), output(grad_e, need_entropy), output(grad_s, need_salience),
          output(grad_a, need_alignment), partial, batch, count, chunks, weight_stride, invert_entropy);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    };
    const int64_t rows = weight_stride ? batch : 1, per_row = batch * chunks / rows;
    if (!need_weights || per_row == 1) return launch(output(grad_w, need_weights));
    Tensor partial = allocate(e, {batch * chunks * 3}, kPartial);
    A* sums = static_cast<A*>(partial.mutable_data_ptr());
    launch(sums);
    weights_grad_kernel<T>
        <<<grid_size(rows, 1), kThreads, 0, scope.stream()>>>(sums, output(grad_w, true), rows, per_row);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {grad_e, grad_s, grad_a, grad_w};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("opponent_balance", TORCH_BOX(&opponent_balance_cuda));
  m.impl("opponent_balance_grad", TORCH_BOX(&opponent_balance_grad_cuda));
}

}  // namespace arr_coc
