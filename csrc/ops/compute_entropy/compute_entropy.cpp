#include "ops/compute_entropy/compute_entropy.h"

#include <torch/csrc/stable/library.h>

#include "common/cpu.h"

namespace arr_coc {
namespace {

// Over a row's z = x / tau: the maximum, sum exp(z - max), and the entropy in nats,
// H = log(sum) - sum exp(z - max) (z - max) / sum.
template <class A>
struct RowEntropy {
  A max, sum, nats;
};

template <class T, class A>
RowEntropy<A> row_entropy(const T* x, int64_t width, A inverse_temperature) {
  A max = -INFINITY;
  for (int64_t d = 0; d < width; ++d) {
    const A z = A(x[d]) * inverse_temperature;
    max = (z > max || z != z) ? z : max;
  }
  A sum = 0, weighted = 0;
  for (int64_t d = 0; d < width; ++d) {
    const A shifted = A(x[d]) * inverse_temperature - max;
    const A weight = std::exp(shifted);
    sum += weight;
    weighted += weight > 0 ? weight * shifted : weight;  // 0 * -inf is 0 here: lim p log p
  }
  return {max, sum, std::log(sum) - weighted / sum};
}

Tensor compute_entropy_cpu(const Tensor& features, double temperature) {
  check_compute_entropy(features, temperature);
  const Tensor x = torch::stable::contiguous(features);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor entropy = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    T* out = static_cast<T*>(entropy.mutable_data_ptr());
    const A scale = A(1 / temperature), norm = width > 1 ? 1 / std::log(A(width)) : A(0);
    parallel_rows(rows, width * 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) out[row] = T(row_entropy(in + row * width, width, scale).nats * norm);
    });
  });
  return entropy;
}

// dH/dx_j = -p_j (ln p_j + H) / (tau ln D)
Tensor compute_entropy_grad_cpu(const Tensor& grad, const Tensor& features, double temperature) {
  check_compute_entropy_grad(grad, features, temperature);
  const Tensor x = torch::stable::contiguous(features), g = torch::stable::contiguous(grad);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor grad_features = torch::stable::new_empty(x, {x.size(0), x.size(1), width});
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    const T* upstream = static_cast<const T*>(g.const_data_ptr());
    T* out = static_cast<T*>(grad_features.mutable_data_ptr());
    const A scale = A(1 / temperature), norm = width > 1 ? scale / std::log(A(width)) : A(0);
    parallel_rows(rows, width * 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const RowEntropy<A> r = row_entropy(in + row * width, width, scale);
        const A factor = -A(upstream[row]) * norm, log_sum = std::log(r.sum);
        for (int64_t d = 0; d < width; ++d) {
          const A log_p = A(in[row * width + d]) * scale - r.max - log_sum, p = std::exp(log_p);
          out[row * width + d] = T(p > 0 ? factor * p * (log_p + r.nats) : factor * p);
        }
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
