#include "ops/scale_bias_relu/scale_bias_relu.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/map.h"

namespace arr_coc {

template <class A>
constexpr bool kSelects<ScaleReluGrad<A>> = true;

namespace {

constexpr int64_t kMostChunks = 64;
constexpr int64_t kBlock = 512;  // elements converted at a time, which fit the first cache

Tensor scale_bias_relu_cpu(const Tensor& x, const Tensor& bias, double scale) {
  check_scale_bias_relu(x, bias);
  const Tensor in = as_contiguous(x), row = as_contiguous(bias);
  Tensor out = allocate(in, in.sizes());
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    parallel_map_rows(ScaleBiasRelu<A>{A(scale)}, static_cast<T*>(out.mutable_data_ptr()), out.numel(),
                      static_cast<const T*>(in.const_data_ptr()), static_cast<const T*>(row.const_data_ptr()),
                      row.size(0));
  });
  return out;
}

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
        const A passed = ReluGrad{}(load(grad[i]), load(output[i]));
        sums[i] += passed;
        grad_x[i] = store<O>(passed * scale);
      }
    } else {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) sums[i] += ReluGrad{}(load(grad[i]), load(output[i]));
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

// `grad_x` may be null.
template <class T>
void scale_bias_relu_grad(const T* grad, const T* output, accumulate_t<T> scale, T* grad_x, T* grad_bias, int64_t rows,
                          int64_t width) {
  using A = accumulate_t<T>;
  const RowChunks chunks(rows, kMostChunks);
  std::vector<A> partial(std::max<int64_t>(1, chunks.count) * width);
  parallel_rows(chunks.count, chunks.rows_each * width * 2, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      RepeatedRow<A> sums(width);
      const int64_t end = std::min((chunk + 1) * chunks.rows_each, rows) * width;
      for (int64_t at = chunk * chunks.rows_each * width; at < end; at += sums.size())
        grad_and_sums(grad + at, output + at, scale, grad_x ? grad_x + at : nullptr, sums.values.data(),
                      std::min(sums.size(), end - at));
      A* sum = partial.data() + chunk * width;
      for (int64_t copy = 0; copy < sums.size(); copy += width)
        for (int64_t d = 0; d < width; ++d) sum[d] += sums.values[copy + d];
    }
  });
  parallel_rows(width, chunks.count, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 1; chunk < chunks.count; ++chunk)
      for (int64_t d = begin; d < end; ++d) partial[d] += partial[chunk * width + d];
    for (int64_t d = begin; d < end; ++d) grad_bias[d] = store<T>(partial[d]);
  });
}

std::tuple<Tensor, Tensor> scale_bias_relu_grad_cpu(const Tensor& grad, const Tensor& output, double scale, bool need_x,
                                                    bool need_bias) {
  check_scale_bias_relu_grad(grad, output);
  const Tensor g = as_contiguous(grad), o = as_contiguous(output);
  const int64_t width = o.size(o.dim() - 1);
  Tensor grad_x = need_x ? allocate(o, o.sizes()) : allocate(o, {0});
  Tensor grad_bias = allocate(o, {need_bias ? width : 0});
  dispatch_floating(o.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* upstream = static_cast<const T*>(g.const_data_ptr());
    const T* out = static_cast<const T*>(o.const_data_ptr());
    T* of_x = need_x ? static_cast<T*>(grad_x.mutable_data_ptr()) : nullptr;
    if (need_bias && width > 0)
      scale_bias_relu_grad(upstream, out, A(scale), of_x, static_cast<T*>(grad_bias.mutable_data_ptr()),
                           o.numel() / width, width);
    else if (need_x)
      parallel_map(ScaleReluGrad<A>{A(scale)}, of_x, o.numel(), upstream, out);
  });
  return {grad_x, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("scale_bias_relu(Tensor x, Tensor bias, float scale) -> Tensor");
  m.def(
      "scale_bias_relu_grad(Tensor grad, Tensor output, float scale, bool need_x, bool need_bias) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("scale_bias_relu", TORCH_BOX(&scale_bias_relu_cpu));
  m.impl("scale_bias_relu_grad", TORCH_BOX(&scale_bias_relu_grad_cpu));
}

}  // namespace arr_coc
