#include "ops/compute_entropy/compute_entropy.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/convert.h"
#include "common/exponential.h"

namespace arr_coc {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

// The largest number of a row. NaN is ignored here, because it reaches every later sum.
template <class A>
ARR_COC_EVERY_ISA A row_max(const A* x, int64_t width) {
  A max = -INFINITY;
#pragma omp simd reduction(max : max)
  for (int64_t d = 0; d < width; ++d) max = x[d] > max ? x[d] : max;
  return max;
}

// log2 of a weight, exp((x - max) / tau), where `scale` is log2 e / tau. It stays finite for a weight of 0, because
// 0 log 0 is 0.
template <class A>
ARR_COC_INLINE A log_weight(A x, A max, A scale) {
  constexpr A none = 2 * kLeastPower<A>;
  const A log = (x - max) * scale;
  return log < none ? none : log;
}

// The sums of a row's weights and of weight log2 weight.
template <class A>
struct RowSums {
  A weights, weighted;
};

template <class A>
ARR_COC_EVERY_ISA RowSums<A> row_sums(const A* x, int64_t width, A max, A scale) {
  A sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
  for (int64_t d = 0; d < width; ++d) {
    const A log = log_weight(x[d], max, scale), weight = power_of_two(log);
    sum += weight;
    weighted += weight * log;
  }
  return {sum, weighted};
}

// The same, which also stores the weights in `weights`.
template <class A>
ARR_COC_EVERY_ISA RowSums<A> row_weights(const A* x, A* weights, int64_t width, A max, A scale) {
  A sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
  for (int64_t d = 0; d < width; ++d) {
    const A log = log_weight(x[d], max, scale), weight = power_of_two(log);
    weights[d] = weight;
    sum += weight;
    weighted += weight * log;
  }
  return {sum, weighted};
}

// Turns weights into gradients: factor weight (log2 weight - mean).
template <class A>
ARR_COC_EVERY_ISA void row_gradient(const A* x, A* weights, int64_t width, A max, A scale, A mean, A factor) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) weights[d] = factor * weights[d] * (log_weight(x[d], max, scale) - mean);
}

Tensor compute_entropy_cpu(const Tensor& features, double temperature) {
  check_compute_entropy(features, temperature);
  const Tensor x = as_contiguous(features);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor entropy = allocate(x, {x.size(0), x.size(1)});
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    T* out = static_cast<T*>(entropy.mutable_data_ptr());
    const A scale = A(kLog2E / temperature), norm = width > 1 ? A(1 / std::log2(width)) : A(0);
    parallel_rows(rows, width * 4, [&](int64_t begin, int64_t end) {
      std::vector<A> buffer;
      for (int64_t row = begin; row < end; ++row) {
        const A* z = accumulated(in + row * width, width, buffer);
        const RowSums<A> sums = row_sums(z, width, row_max(z, width), scale);
        out[row] = store<T>((std::log2(sums.weights) - sums.weighted / sums.weights) * norm);
      }
    });
  });
  return entropy;
}

// dH/dx_j = -p_j (ln p_j + H) / (tau ln D), where ln p_j + H is the logarithm of the weight minus its weighted mean.
Tensor compute_entropy_grad_cpu(const Tensor& grad, const Tensor& features, double temperature) {
  check_compute_entropy_grad(grad, features, temperature);
  const Tensor x = as_contiguous(features), g = as_contiguous(grad);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor grad_features = allocate(x, {x.size(0), x.size(1), width});
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    const T* upstream = static_cast<const T*>(g.const_data_ptr());
    T* out = static_cast<T*>(grad_features.mutable_data_ptr());
    const A scale = A(kLog2E / temperature), norm = width > 1 ? A(1 / (temperature * std::log2(width))) : A(0);
    parallel_rows(rows, width * 6, [&](int64_t begin, int64_t end) {
      std::vector<A> buffer;
      StagedRow<T> staged(width);
      for (int64_t row = begin; row < end; ++row) {
        const A* z = accumulated(in + row * width, width, buffer);
        A* slopes = staged.at(out + row * width);
        const A max = row_max(z, width);
        const RowSums<A> sums = row_weights(z, slopes, width, max, scale);
        const A factor = -load(upstream[row]) * norm / sums.weights;
        row_gradient(z, slopes, width, max, scale, sums.weighted / sums.weights, factor);
        staged.store_to(out + row * width);
      }
    });
  });
  return grad_features;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("compute_entropy(Tensor features, float temperature=1.0) -> Tensor");
  m.def("compute_entropy_grad(Tensor grad, Tensor features, float temperature) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("compute_entropy", TORCH_BOX(&compute_entropy_cpu));
  m.impl("compute_entropy_grad", TORCH_BOX(&compute_entropy_grad_cpu));
}

}  // namespace arr_coc
