#include "arr_coc/scale_bias_relu/scale_bias_relu.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.h"

namespace arr_coc {

template <class A>
constexpr bool kSelects<ScaleReluGrad<A>> = true;

namespace {

constexpr int64_t kMostChunks = 64;
constexpr int64_t kBlock = 512;  // elements converted at a time, which fit the first cache

// Adds the passed gradient to `sums`; writes it times `scale` unless grad_x is null.
template <class T, class A, class O>
ARR_COC_EVERY_ISA void grad_loop(const T* grad, const T* output, A scale, O* grad_x, A* sums, int64_t size) {
  for (int64_t begin = 0; begin < size; begin += kPrefetchBlock) {
    const int64_t end = std::min(begin + kPrefetchBlock, size);
    prefetch_behind(grad + begin);
    prefetch_behind(output + begin);
    if (grad_x) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A passed = ReluGrad<A>{}(load(grad[i]), load(output[i]));
        sums[i] += passed;
        grad_x[i] = store<O>(passed * scale);
      }
    } else {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) sums[i] += ReluGrad<A>{}(load(grad[i]), load(output[i]));
    }
  }
}

template <class T, class A>
void grad_and_sums(const T* grad, const T* output, A scale, T* grad_x, A* sums, int64_t size) {
  if constexpr (std::is_same_v<T, Half>) {
    A g[kBlock], o[kBlock];
    for (int64_t at = 0; at < size; at += kBlock) {
      const int64_t count = std::min(kBlock, size - at);
      widen(grad + at, g, count);
      widen(output + at, o, count);
      grad_loop(g, o, scale, grad_x ? g : nullptr, sums + at, count);
      if (grad_x) narrow(g, grad_x + at, count);
    }
  } else {
    grad_loop(grad, output, scale, grad_x, sums, size);
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const ScaleBiasReluGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width;
  const RowChunks chunks(call.rows, kMostChunks);
  std::vector<A> partial(chunks.count * width);
  parallel_rows(chunks.count, chunks.rows_each * width * 2, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      RepeatedRow<A> sums(width);
      const int64_t end = std::min((chunk + 1) * chunks.rows_each, call.rows) * width;
      for (int64_t at = chunk * chunks.rows_each * width; at < end; at += sums.size())
        grad_and_sums(call.grad + at, call.output + at, call.scale, call.grad_x ? call.grad_x + at : nullptr,
                      sums.values.data(), std::min(sums.size(), end - at));
      A* sum = partial.data() + chunk * width;
      for (int64_t copy = 0; copy < sums.size(); copy += width)
        for (int64_t d = 0; d < width; ++d) sum[d] += sums.values[copy + d];
    }
  });
  parallel_rows(width, chunks.count, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 1; chunk < chunks.count; ++chunk)
      for (int64_t d = begin; d < end; ++d) partial[d] += partial[chunk * width + d];
    for (int64_t d = begin; d < end; ++d) call.grad_bias[d] = store<T>(partial[d]);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("scale_bias_relu(Tensor x, Tensor bias, float scale) -> Tensor");
  m.def(
      "scale_bias_relu_grad(Tensor grad, Tensor output, float scale, bool need_x, bool need_bias) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("scale_bias_relu", TORCH_BOX(&scale_bias_relu<Cpu>));
  m.impl("scale_bias_relu_grad", TORCH_BOX(&scale_bias_relu_grad<Cpu>));
}

}  // namespace arr_coc
