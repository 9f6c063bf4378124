#include "arr_coc/compute_entropy/compute_entropy.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "arr_coc/common/convert.h"
#include "arr_coc/common/exponential.h"

namespace arr_coc {
namespace {

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

// Stores the weights in `weights`, too, if kStore.
template <bool kStore, class A>
ARR_COC_EVERY_ISA RowSums<A> row_sums(const A* x, A* weights, int64_t width, A max, A scale) {
  A sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
  for (int64_t d = 0; d < width; ++d) {
    const A log = log_weight(x[d], max, scale), weight = power_of_two(log);
    if constexpr (kStore) weights[d] = weight;
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

}  // namespace

template <class T>
void run(const Cpu&, const Entropy<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width;
  parallel_rows(call.rows, width * 4, [&](int64_t begin, int64_t end) {
    std::vector<A> buffer;
    for (int64_t row = begin; row < end; ++row) {
      const A* z = accumulated(call.x + row * width, width, buffer);
      const RowSums<A> sums = row_sums<false, A>(z, nullptr, width, row_max(z, width), call.scale);
      call.out[row] = store<T>((std::log2(sums.weights) - sums.weighted / sums.weights) * call.norm);
    }
  });
}

// dH/dx_j = -p_j (ln p_j + H) / (tau ln D), where ln p_j + H is the logarithm of the weight minus its weighted mean.
template <class T>
void run(const Cpu&, const EntropyGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width;
  parallel_rows(call.rows, width * 6, [&](int64_t begin, int64_t end) {
    std::vector<A> buffer;
    StagedRow<T> staged(width);
    for (int64_t row = begin; row < end; ++row) {
      const A* z = accumulated(call.x + row * width, width, buffer);
      A* slopes = staged.at(call.out + row * width);
      const A max = row_max(z, width);
      const RowSums<A> sums = row_sums<true>(z, slopes, width, max, call.scale);
      const A factor = -load(call.grad[row]) * call.norm / sums.weights;
      row_gradient(z, slopes, width, max, call.scale, sums.weighted / sums.weights, factor);
      staged.store_to(call.out + row * width);
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("compute_entropy(Tensor features, float temperature=1.0) -> Tensor");
  m.def("compute_entropy_grad(Tensor grad, Tensor features, float temperature) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("compute_entropy", TORCH_BOX(&compute_entropy<Cpu>));
  m.impl("compute_entropy_grad", TORCH_BOX(&compute_entropy_grad<Cpu>));
}

}  // namespace arr_coc
