#include "arr_coc/fused_layer_norm/fused_layer_norm.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "arr_coc/common/convert.h"
#include "arr_coc/common/cpu.h"
#include "arr_coc/common/lanes.h"

namespace arr_coc {
namespace {

// The most partial sums of the parameters' gradients. Their rows depend on the shape alone, so the sums do not depend
// on the number of threads.
constexpr int64_t kParts = 64;
constexpr int64_t kPartRows = 16;

// An addition waits for the previous one of the same sum, so each lane has kSums sums.
constexpr int64_t kSums = 2, kStep = kSums * kLanes;

// The sum of a step's sums.
template <class A>
ARR_COC_INLINE A sum_of_step(const A (&sums)[kStep]) {
  A lanes[kLanes];
#pragma omp simd
  for (int64_t j = 0; j < kLanes; ++j) lanes[j] = sums[j] + sums[j + kLanes];
  return sum_of_lanes(lanes);
}

template <class A>
ARR_COC_INLINE A sum_of(const A* x, int64_t width) {
  A sums[kStep] = {};
  int64_t d = 0;
  for (; d + 2 * kStep <= width; d += 2 * kStep) {
    prefetch_behind(x + d, 2 * kStep);
#pragma omp simd
    for (int64_t j = 0; j < kStep; ++j) sums[j] += x[d + j] + x[d + j + kStep];
  }
  A last = 0;
  if (d < width) {
#pragma omp simd reduction(+ : last)
    for (int64_t j = d; j < width; ++j) last += x[j];
  }
  return sum_of_step(sums) + last;
}

// Sums of (x - mean) and of its square.
template <class A>
ARR_COC_INLINE std::pair<A, A> deviations(const A* x, A mean, int64_t width) {
  A sums[kStep] = {}, squares[kStep] = {};
  const auto add = [&](int64_t j, A& sum, A& square) __attribute__((always_inline)) {
    const A deviation = x[j] - mean;
    sum += deviation;
    square += deviation * deviation;
  };
  int64_t d = 0;
  for (; d + kStep <= width; d += kStep) {
#pragma omp simd
    for (int64_t j = 0; j < kStep; ++j) add(d + j, sums[j], squares[j]);
  }
  A last = 0, last_square = 0;
  if (d < width) {
#pragma omp simd reduction(+ : last, last_square)
    for (int64_t j = d; j < width; ++j) add(j, last, last_square);
  }
  return {sum_of_step(sums) + last, sum_of_step(squares) + last_square};
}

template <class A>
struct Statistics {
  // The mean is first_mean + shift. Far from 0, first_mean has a rounding error that may exceed the differences of the
  // values; the mean of the deviations corrects it.
  A first_mean, shift, rstd;
};

template <class A>
ARR_COC_INLINE Statistics<A> statistics_of(const A* x, int64_t width, A eps) {
  const A first_mean = sum_of(x, width) / A(width);
  const auto [sum, squares] = deviations(x, first_mean, width);
  const A shift = sum / A(width), variance = squares / A(width) - shift * shift;
  return {first_mean, shift, 1 / std::sqrt((variance < 0 ? A(0) : variance) + eps)};
}

// Each row's output may be the row itself.
template <class A>
ARR_COC_EVERY_ISA void layer_norm_rows(const A* in, const A* weight, const A* bias, int64_t rows, int64_t width, A eps,
                                       A* out, A* means, A* rstds) {
  for (int64_t row = 0; row < rows; ++row, in += width, out += width) {
    const Statistics<A> statistics = statistics_of(in, width, eps);
    means[row] = statistics.first_mean + statistics.shift;
    rstds[row] = statistics.rstd;
    const auto [mean, shift, rstd] = statistics;
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) out[d] = (in[d] - mean - shift) * rstd * weight[d] + bias[d];
  }
}

// With z = (x - mean) rstd and g = grad weight: the gradients of these rows of x, and these rows' part of the gradients
// of weight and bias.
template <bool kX, bool kColumns, class A>
ARR_COC_EVERY_ISA void layer_norm_grad_rows(const A* grad, const A* x, const A* weight, const A* means, const A* rstds,
                                            int64_t rows, int64_t width, A* out, A* of_weight, A* of_bias) {
  for (int64_t row = 0; row < rows; ++row, grad += width, x += width, out += width) {
    const A mean = means[row], rstd = rstds[row];
    A sums[kStep] = {}, products[kStep] = {};
    const auto add = [&](int64_t j, A& sum, A& product) __attribute__((always_inline)) {
      const A z = (x[j] - mean) * rstd;
      if constexpr (kX) {
        const A g = grad[j] * weight[j];
        sum += g;
        product += g * z;
      }
      if constexpr (kColumns) {
        of_weight[j] += grad[j] * z;
        of_bias[j] += grad[j];
      }
    };
    int64_t d = 0;
    for (; d + kStep <= width; d += kStep) {
      prefetch_behind(grad + d, kStep);
      prefetch_behind(x + d, kStep);
#pragma omp simd
      for (int64_t j = d; j < d + kStep; ++j) add(j, sums[j - d], products[j - d]);
    }
    A last = 0, last_product = 0;
    if (d < width) {
#pragma omp simd reduction(+ : last, last_product)
      for (int64_t j = d; j < width; ++j) add(j, last, last_product);
    }
    if constexpr (kX) {
      const A mean_g = (sum_of_step(sums) + last) / A(width);
      const A mean_product = (sum_of_step(products) + last_product) / A(width);
#pragma omp simd
      for (int64_t j = 0; j < width; ++j)
        out[j] = rstd * (grad[j] * weight[j] - mean_g - (x[j] - mean) * rstd * mean_product);
    }
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const LayerNorm<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width;
  std::vector<A> buffers(std::is_same_v<T, A> ? 0 : 2 * width);
  const A *weight = accumulated(call.weight, width, buffers.data()),
          *bias = accumulated(call.bias, width, buffers.data() + width);
  parallel_rows(call.rows, width * 2, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, A>) {
      layer_norm_rows(call.x + begin * width, weight, bias, end - begin, width, call.eps, call.y + begin * width,
                      call.mean + begin, call.rstd + begin);
    } else {
      std::vector<A> buffer(width);
      for (int64_t row = begin; row < end; ++row) {
        widen(call.x + row * width, buffer.data(), width);
        layer_norm_rows<A>(buffer.data(), weight, bias, 1, width, call.eps, buffer.data(), call.mean + row,
                           call.rstd + row);
        narrow(buffer.data(), call.y + row * width, width);
      }
    }
  });
}

template <class T>
void run(const Cpu&, const LayerNormGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width, rows = call.rows;
  const bool columns = call.grad_weight || call.grad_bias;
  const int64_t part_rows = std::max(kPartRows, (rows + kParts - 1) / kParts);
  const int64_t parts = (rows + part_rows - 1) / part_rows;
  std::vector<A> partial(columns ? parts * 2 * width : 0), weight_buffer;
  const A* weight = accumulated(call.weight, width, weight_buffer);
  const auto grad_rows = !call.grad_x ? layer_norm_grad_rows<false, true, A>
                         : columns    ? layer_norm_grad_rows<true, true, A>
                                      : layer_norm_grad_rows<true, false, A>;
  parallel_rows(call.grad_x || columns ? parts : 0, part_rows * width * 4, [&](int64_t begin, int64_t end) {
    std::vector<A> buffer(std::is_same_v<T, A> ? 0 : 2 * width);
    for (int64_t part = begin; part < end; ++part) {
      A* of_weight = partial.data() + part * 2 * width;
      const int64_t first = part * part_rows, last = std::min(rows, first + part_rows);
      if constexpr (std::is_same_v<T, A>) {
        grad_rows(call.grad + first * width, call.x + first * width, weight, call.mean + first, call.rstd + first,
                  last - first, width, call.grad_x + first * width, of_weight, of_weight + width);
      } else {
        for (int64_t row = first; row < last; ++row) {
          A *grad = buffer.data(), *x = grad + width;
          widen(call.grad + row * width, grad, width);
          widen(call.x + row * width, x, width);
          grad_rows(grad, x, weight, call.mean + row, call.rstd + row, 1, width, grad, of_weight, of_weight + width);
          if (call.grad_x) narrow(grad, call.grad_x + row * width, width);
        }
      }
    }
  });
  const auto add_parts = [&](const A* first, T* sums) {
    std::vector<A> total(width);
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t d = 0; d < width; ++d) total[d] += first[part * 2 * width + d];
    std::copy(total.begin(), total.end(), sums);
  };
  if (call.grad_weight) add_parts(partial.data(), call.grad_weight);
  if (call.grad_bias) add_parts(partial.data() + width, call.grad_bias);
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "fused_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-05) -> (Tensor y, Tensor mean, "
      "Tensor rstd)");
  m.def(
      "fused_layer_norm_grad(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool need_x, "
      "bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("fused_layer_norm", TORCH_BOX(&fused_layer_norm<Cpu>));
  m.impl("fused_layer_norm_grad", TORCH_BOX(&fused_layer_norm_grad<Cpu>));
}

}  // namespace arr_coc
