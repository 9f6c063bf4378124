#include <torch/csrc/stable/library.h>

#include "arr_coc/common/cuda.cuh"
#include "arr_coc/opponent_balance/opponent_balance.h"

namespace arr_coc {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

template <class T, int kVector>
__global__ void balance_kernel(const T* entropy, const T* salience, const T* alignment, const T* weights, T* out,
                               int64_t total, int64_t count, int64_t weight_stride, bool invert) {
  using A = accumulate_t<T>;
  using V = Pack<T, kVector>;  // where kVector > 1, it divides a sample, and the addresses allow 16 bytes
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total / kVector;
       i += int64_t(gridDim.x) * kThreads) {
    const V e = reinterpret_cast<const V*>(entropy)[i], s = reinterpret_cast<const V*>(salience)[i],
            a = reinterpret_cast<const V*>(alignment)[i];
    const Balance<A> balance(weights + (weight_stride ? i * kVector / count * weight_stride : 0));
    V result;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const A raw = balance(invert ? 1 - A(e.values[j]) : A(e.values[j]), A(s.values[j]), A(a.values[j]));
      result.values[j] = T(raw < 0 ? A(0) : raw > 1 ? A(1) : raw);  // NaN stays, as in torch.clamp
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
  using V = Pack<T, kVector>;
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
        for (int j = 0; j < kVector && i + j < base + end; ++j) vector.values[j] = tensor[i + j];
        return vector;
      };
      const auto store = [&](T* tensor, const V& vector) {
        if (!tensor) return;
        if (kWide) {
          *reinterpret_cast<V*>(tensor + i) = vector;
        } else {
          for (int j = 0; j < kVector && i + j < base + end; ++j) tensor[i + j] = vector.values[j];
        }
      };
      const V g = load(grad), e = load(entropy), s = load(salience), a = load(alignment);
      V of_e, of_s, of_a;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (!kWide && i + j >= base + end) continue;
        const A x = invert ? 1 - A(e.values[j]) : A(e.values[j]), y = A(s.values[j]), z = A(a.values[j]);
        const A raw = balance(x, y, z), slope = (raw >= 0 && raw <= 1 ? A(g.values[j]) : A(0)) / balance.sum;
        of_e.values[j] = T(invert ? -slope * balance.c : slope * balance.c);
        of_s.values[j] = T(slope * balance.p);
        of_a.values[j] = T(slope * balance.f);
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

}  // namespace

template <class T>
void run(const Cuda& device, const OpponentBalance<T>& call) {
  constexpr int kVector = 16 / sizeof(T);
  const auto [e, s, a, weights, out, batch, count, weight_stride, invert] = call;
  const int64_t total = batch * count;
  const bool wide = count % kVector == 0 && start_on_16_bytes(e, s, a, out);
  const auto kernel = wide ? balance_kernel<T, kVector> : balance_kernel<T, 1>;
  device.launch(kernel, {grid_size(total, kThreads * (wide ? kVector : 1)), kThreads}, e, s, a, weights, out, total,
                count, weight_stride, invert);
}

// `partial` is the kernel's: the weights' gradient itself, or memory for the chunks' sums; null if neither is needed.
template <class T, class Partial>
void launch_grad(const Cuda& device, const OpponentBalanceGrad<T>& call, Partial* partial) {
  constexpr int kVector = 16 / sizeof(T);
  const bool wide =
      call.count % kVector == 0 && start_on_16_bytes(call.grad, call.entropy, call.salience, call.alignment,
                                                     call.grad_entropy, call.grad_salience, call.grad_alignment);
  // Few elements are distributed one by one, so that more threads have work.
  const auto kernel = call.count < kThreads * kVector ? balance_grad_kernel<1, true, T, Partial>
                      : wide                          ? balance_grad_kernel<kVector, true, T, Partial>
                                                      : balance_grad_kernel<kVector, false, T, Partial>;
  device.launch(kernel, {grid_size(call.batch * call.chunks(), 1), kThreads}, call.grad, call.entropy, call.salience,
                call.alignment, call.weights, call.grad_entropy, call.grad_salience, call.grad_alignment, partial,
                call.batch, call.count, call.chunks(), call.weight_stride, call.invert);
}

template <class T>
void run(const Cuda& device, const OpponentBalanceGrad<T>& call) {
  const int64_t items = call.batch * call.chunks(), rows = call.weight_stride ? call.batch : 1, per_row = items / rows;
  if (!call.grad_weights || per_row == 1) return launch_grad(device, call, call.grad_weights);
  Scratch<accumulate_t<T>> partial(device, items * 3);
  launch_grad(device, call, partial.data());
  device.launch(weights_grad_kernel<T>, {grid_size(rows, 1), kThreads}, partial.data(), call.grad_weights, rows,
                per_row);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("opponent_balance", TORCH_BOX(&opponent_balance<Cuda>));
  m.impl("opponent_balance_grad", TORCH_BOX(&opponent_balance_grad<Cuda>));
}

}  // namespace arr_coc
