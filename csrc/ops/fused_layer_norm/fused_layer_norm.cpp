#include "ops/fused_layer_norm/fused_layer_norm.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/convert.h"

namespace arr_coc {
namespace {

// At most this many partial sums of the parameters' gradients. The rows of each follow from the shape alone, so that
// the sums do not depend on the number of threads.
constexpr int64_t kParts = 64;
constexpr int64_t kPartRows = 16;

// A sum waits for the one before it: these loops take several stretches of a row at once, each with sums of its own.
template <class A>
ARR_COC_EVERY_ISA A sum_of(const A* x, int64_t width) {
  const int64_t quarter = width / 4;
  const A *x1 = x + quarter, *x2 = x1 + quarter, *x3 = x2 + quarter;
  A s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t d = 0; d < quarter; ++d) s0 += x[d], s1 += x1[d], s2 += x2[d], s3 += x3[d];
  for (int64_t d = 4 * quarter; d < width; ++d) s0 += x[d];
  return (s0 + s1) + (s2 + s3);
}

// Sums of (x - mean) and of its square.
template <class A>
ARR_COC_EVERY_ISA std::pair<A, A> deviations(const A* x, A mean, int64_t width) {
  const int64_t half = width / 2;
  const A* x1 = x + half;
  A s0 = 0, s1 = 0, q0 = 0, q1 = 0;
#pragma omp simd reduction(+ : s0, s1, q0, q1)
  for (int64_t d = 0; d < half; ++d) {
    const A d0 = x[d] - mean, d1 = x1[d] - mean;
    s0 += d0, s1 += d1;
    q0 += d0 * d0, q1 += d1 * d1;
  }
  const A last = width % 2 ? x[width - 1] - mean : A(0);
  return {s0 + s1 + last, q0 + q1 + last * last};
}

// y may be x.
template <class A>
ARR_COC_EVERY_ISA void normalise(const A* x, const A* weight, const A* bias, A mean, A shift, A rstd, int64_t width,
                                 A* y) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) y[d] = (x[d] - mean - shift) * rstd * weight[d] + bias[d];
}

// Sums over a row of g and of g z, where g = grad weight and z = (x - mean) rstd.
template <class A>
ARR_COC_EVERY_ISA std::pair<A, A> products(const A* grad, const A* x, const A* weight, A mean, A rstd, int64_t width) {
  const int64_t half = width / 2;
  const A *grad1 = grad + half, *x1 = x + half, *weight1 = weight + half;
  A s0 = 0, s1 = 0, p0 = 0, p1 = 0;
#pragma omp simd reduction(+ : s0, s1, p0, p1)
  for (int64_t d = 0; d < half; ++d) {
    const A g0 = grad[d] * weight[d], g1 = grad1[d] * weight1[d];
    s0 += g0, s1 += g1;
    p0 += g0 * ((x[d] - mean) * rstd), p1 += g1 * ((x1[d] - mean) * rstd);
  }
  const A last = width % 2 ? grad[width - 1] * weight[width - 1] : A(0);
  return {s0 + s1 + last, p0 + p1 + last * ((x[width - 1] - mean) * rstd)};
}

template <class A>
ARR_COC_EVERY_ISA void grad_of_x(const A* grad, const A* x, const A* weight, A mean, A rstd, std::pair<A, A> means,
                                 int64_t width, A* out) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d)
    out[d] = rstd * (grad[d] * weight[d] - means.first - (x[d] - mean) * rstd * means.second);
}

template <class A>
ARR_COC_EVERY_ISA void add_to_columns(const A* grad, const A* x, A mean, A rstd, int64_t width, A* of_weight,
                                      A* of_bias) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) {
    of_weight[d] += grad[d] * ((x[d] - mean) * rstd);
    of_bias[d] += grad[d];
  }
}

// A row in the dtype it is computed in: itself, or a copy in `buffer`.
template <class T, class A>
const A* widened(const T* row, int64_t width, A* buffer) {
  if constexpr (std::is_same_v<T, A>) {
    return row;
  } else {
    widen(row, buffer, width);
    return buffer;
  }
}

template <class T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

std::tuple<Tensor, Tensor, Tensor> fused_layer_norm_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                        double eps) {
  check_fused_layer_norm(x, weight, bias, eps);
  const Tensor input = torch::stable::contiguous(x), weights = torch::stable::contiguous(weight),
               biases = torch::stable::contiguous(bias);
  const auto sizes = input.sizes(), rows = sizes.slice(0, sizes.size() - 1);
  const int64_t width = x.size(-1);
  const ScalarType wide = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  Tensor y = torch::stable::new_empty(input, sizes), mean = torch::stable::new_empty(input, rows, wide),
         rstd = torch::stable::new_empty(input, rows, wide);
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = data_of<T>(input);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    A *means = static_cast<A*>(mean.mutable_data_ptr()), *rstds = static_cast<A*>(rstd.mutable_data_ptr());
    std::vector<A> buffers(std::is_same_v<T, A> ? 0 : 2 * width);
    const A* w = widened(data_of<T>(weights), width, buffers.data());
    const A* b = widened(data_of<T>(biases), width, buffers.data() + width);
    parallel_rows(input.numel() / width, width * 2, [&](int64_t begin, int64_t end) {
      std::vector<A> buffer(std::is_same_v<T, A> ? 0 : width);
      for (int64_t row = begin; row < end; ++row) {
        const A* values = widened(in + row * width, width, buffer.data());
        // Far from 0 the mean is rounded, by more than the values differ; the mean of the deviations says by how much.
        const A first_mean = sum_of(values, width) / A(width);
        const auto [sum, squares] = deviations(values, first_mean, width);
        const A shift = sum / A(width), variance = squares / A(width) - shift * shift;
        means[row] = first_mean + shift;
        rstds[row] = 1 / std::sqrt((variance < 0 ? A(0) : variance) + A(eps));
        if constexpr (std::is_same_v<T, A>) {
          normalise(values, w, b, first_mean, shift, rstds[row], width, out + row * width);
        } else {
          normalise(values, w, b, first_mean, shift, rstds[row], width, buffer.data());
          narrow(buffer.data(), out + row * width, width);
        }
      }
    });
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> fused_layer_norm_grad_cpu(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                             const Tensor& mean, const Tensor& rstd, bool need_x,
                                                             bool need_weight, bool need_bias) {
  check_fused_layer_norm_grad(grad, x, weight, mean, rstd);
  const Tensor upstream = torch::stable::contiguous(grad), input = torch::stable::contiguous(x),
               weights = torch::stable::contiguous(weight), means = torch::stable::contiguous(mean),
               rstds = torch::stable::contiguous(rstd);
  const int64_t width = x.size(-1), rows = input.numel() / width;
  const std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end()), column{width}, nothing{0};
  Tensor grad_x = torch::stable::new_empty(input, need_x ? sizes : nothing),
         grad_weight = torch::stable::new_empty(input, need_weight ? column : nothing),
         grad_bias = torch::stable::new_empty(input, need_bias ? column : nothing);
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const bool columns = need_weight || need_bias;
    const int64_t part_rows = std::max(kPartRows, (rows + kParts - 1) / kParts);
    const int64_t parts = (rows + part_rows - 1) / part_rows;
    std::vector<A> partial(columns ? parts * 2 * width : 0), buffers(std::is_same_v<T, A> ? 0 : width);
    const A* w = widened(data_of<T>(weights), width, buffers.data());
    T* out = need_x ? static_cast<T*>(grad_x.mutable_data_ptr()) : nullptr;
    parallel_rows(parts, part_rows * width * 4, [&](int64_t begin, int64_t end) {
      std::vector<A> buffer(std::is_same_v<T, A> ? 0 : 2 * width);
      for (int64_t part = begin; part < end; ++part) {
        A* of_weight = partial.data() + part * 2 * width;
        for (int64_t row = part * part_rows; row < std::min(rows, (part + 1) * part_rows); ++row) {
          const A* g = widened(data_of<T>(upstream) + row * width, width, buffer.data());
          const A* values = widened(data_of<T>(input) + row * width, width, buffer.data() + width);
          const A m = data_of<A>(means)[row], r = data_of<A>(rstds)[row];
          if (columns) add_to_columns(g, values, m, r, width, of_weight, of_weight + width);
          if (!need_x) continue;
          auto [sum, along] = products(g, values, w, m, r, width);
          const std::pair<A, A> row_means{sum / A(width), along / A(width)};
          if constexpr (std::is_same_v<T, A>) {
            grad_of_x(g, values, w, m, r, row_means, width, out + row * width);
          } else {
            grad_of_x(g, values, w, m, r, row_means, width, buffer.data());
            narrow(buffer.data(), out + row * width, width);
          }
        }
      }
    });
    auto add_parts = [&](const A* first, Tensor& sums) {
      std::vector<A> total(width);
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t d = 0; d < width; ++d) total[d] += first[part * 2 * width + d];
      std::copy(total.begin(), total.end(), static_cast<T*>(sums.mutable_data_ptr()));
    };
    if (need_weight) add_parts(partial.data(), grad_weight);
    if (need_bias) add_parts(partial.data() + width, grad_bias);
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "fused_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-05) -> (Tensor y, Tensor mean, "
      "Tensor rstd)");
  m.def(
      "fused_layer_norm_grad(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool need_x, "
      "bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("fused_layer_norm", TORCH_BOX(&fused_layer_norm_cpu));
  m.impl("fused_layer_norm_grad", TORCH_BOX(&fused_layer_norm_grad_cpu));
}

}  // namespace arr_coc
