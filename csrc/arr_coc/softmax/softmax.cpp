#include "arr_coc/softmax/softmax.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "arr_coc/common/cpu.h"
#include "arr_coc/common/exponential.h"
#include "arr_coc/common/lanes.h"
#include "arr_coc/common/map.h"

namespace arr_coc {
namespace {

// The elements of a block. A single sum over a row of 100000 would lose four digits.
constexpr int64_t kBlock = 2048;
// Rows are processed in whole vectors of any processor and type: the exponential of one remaining element takes as long
// as a whole vector's.
constexpr int64_t kWhole = 16;

// Processes a multiple of kWhole elements; `out` may be `x`. The maximum ignores NaN, which reaches the sum.
template <class A>
ARR_COC_EVERY_ISA void softmax_vectors(const A* x, A* out, int64_t vectors) {
  const int64_t width = vectors * kWhole;
  A most = -INFINITY, total = 0;
#pragma omp simd reduction(max : most)
  for (int64_t d = 0; d < width; ++d) most = x[d] > most ? x[d] : most;
  for (int64_t at = 0; at < width; at += kBlock) {
    const int64_t end = std::min(at + kBlock, width) / kWhole * kWhole;
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = at; d < end; ++d) {
      const A power = exponential(x[d] - most);
      out[d] = power;
      sum += power;
    }
    total += sum;
  }
  const A factor = 1 / total;
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) out[d] *= factor;
}

template <bool kPrefetch, class T, class A>
ARR_COC_INLINE A sum_of_products(const T* x, const T* y, int64_t width) {
  constexpr int64_t kStep = 4 * kLanes;  // an addition starts before the last one is done
  A total = 0;
  for (int64_t at = 0; at < width; at += kBlock) {
    const int64_t end = std::min(at + kBlock, width);
    A sums[kStep] = {}, lanes[kLanes], last = 0;
    int64_t d = at;
    for (; d + kStep <= end; d += kStep) {
      if constexpr (kPrefetch) {
        prefetch_behind(x + d, kStep);
        prefetch_behind(y + d, kStep);
      }
#pragma omp simd
      for (int64_t j = 0; j < kStep; ++j) sums[j] += A(load(x[d + j])) * A(load(y[d + j]));
    }
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j)
      lanes[j] = (sums[j] + sums[j + kLanes]) + (sums[j + 2 * kLanes] + sums[j + 3 * kLanes]);
    for (; d + kLanes <= end; d += kLanes) {
#pragma omp simd
      for (int64_t j = 0; j < kLanes; ++j) lanes[j] += A(load(x[d + j])) * A(load(y[d + j]));
    }
    for (; d < end; ++d) last += A(load(x[d])) * A(load(y[d]));
    total += sum_of_lanes(lanes) + last;
  }
  return total;
}

template <class A>
struct RowGrad {
  A sum;
  ARR_COC_FUNCTION A operator()(A grad, A output) const { return output * (grad - sum); }
};

// Takes several rows per call, because a short row takes less time than a call.
template <class T, class A>
ARR_COC_EVERY_ISA void softmax_grad_rows(const T* grad, const T* y, T* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, grad += width, y += width, out += width) {
    const RowGrad<A> of{sum_of_products<true, T, A>(grad, y, width)};
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) out[d] = store<T>(of(A(load(grad[d])), A(load(y[d]))));
  }
}

// The same, but the second pass, whose row is in the first cache, also prefetches the next row of `y`, which has left
// the caches since the forward call. `grad` is still in them.
template <class T>
ARR_COC_EVERY_ISA void softmax_grad_rows_ahead(const T* grad, const T* y, T* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, grad += width, y += width, out += width) {
    const RowGrad<T> of{sum_of_products<false, T, T>(grad, y, width)};
    for (int64_t d = 0; d < width; d += kLanes) {
      prefetch(y + width + d, kLanes);
#pragma omp simd
      for (int64_t j = d; j < d + kLanes; ++j) out[j] = of(grad[j], y[j]);
    }
  }
}

// The row lengths for which that is faster. A shorter row ends too soon; in a longer one the processor prefetches far
// enough.
template <class T>
bool pays_to_ask_ahead(int64_t width) {
  const int64_t bytes = width * int64_t(sizeof(T));
  return width % kLanes == 0 && 1024 <= bytes && bytes <= 4096;
}

#ifdef ARR_COC_HALF_VECTORS
ARR_COC_HALF_VECTORS inline void add_products(const Half* x, const Half* y, Eight& sums) {
  const Eight a = load_eight(x), b = load_eight(y);
#pragma omp simd
  for (int j = 0; j < 8; ++j) sums.values[j] += a.values[j] * b.values[j];
}

ARR_COC_HALF_VECTORS void softmax_grad_vectors(const Half* grad, const Half* y, Half* out, int64_t rows,
                                               int64_t width) {
  constexpr int kSums = 4;  // an addition starts before the last one is done
  const int64_t whole = width / 8 * 8, rest = width - whole;
  Half last_grad[8] = {}, last_y[8] = {};  // the rest, among zeros
  for (int64_t row = 0; row < rows; ++row, grad += width, y += width, out += width) {
    Eight total[kSums] = {};
    int64_t d = 0;
    for (; d + 8 * kSums <= width; d += 8 * kSums)
      for (int k = 0; k < kSums; ++k) add_products(grad + d + 8 * k, y + d + 8 * k, total[k]);
    for (; d < whole; d += 8) add_products(grad + d, y + d, total[0]);
    if (rest > 0) {
      std::copy_n(grad + whole, rest, last_grad);
      std::copy_n(y + whole, rest, last_y);
      add_products(last_grad, last_y, total[1]);
    }
    float sum = 0;
    for (int j = 0; j < 8; ++j)
      sum += (total[0].values[j] + total[1].values[j]) + (total[2].values[j] + total[3].values[j]);
    const RowGrad<float> of{sum};
    map_vectors(of, out, whole, grad, y);
    if (rest > 0) {
      Half last[8];
      map_vectors(of, last, 8, last_grad, last_y);
      std::copy_n(last, rest, out + whole);
    }
  }
}
#endif

}  // namespace

template <class T>
void run(const Cpu&, const Softmax<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width, vectors = (width + kWhole - 1) / kWhole;
  parallel_rows(call.rows, width * 8, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, A>) {
      if (vectors * kWhole == width) {
        for (int64_t at = begin * width; at < end * width; at += width)
          softmax_vectors(call.x + at, call.out + at, vectors);
        return;
      }
    }
    std::vector<A> buffer(vectors * kWhole);
    for (int64_t at = begin * width; at < end * width; at += width) {
      widen(call.x + at, buffer.data(), width);
      std::fill(buffer.begin() + width, buffer.end(), A(-INFINITY));
      softmax_vectors<A>(buffer.data(), buffer.data(), vectors);
      narrow(buffer.data(), call.out + at, width);
    }
  });
}

template <class T>
void run(const Cpu&, const SoftmaxGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width;
  parallel_rows(call.rows, width * 4, [&](int64_t begin, int64_t end) {
    const T *grad = call.grad + begin * width, *y = call.output + begin * width;
    T* out = call.out + begin * width;
#ifdef ARR_COC_HALF_VECTORS
    if constexpr (std::is_same_v<T, Half>)
      if (has_half_vectors()) return softmax_grad_vectors(grad, y, out, end - begin, width);
#endif
    if constexpr (std::is_same_v<T, A>)
      if (pays_to_ask_ahead<T>(width)) return softmax_grad_rows_ahead(grad, y, out, end - begin, width);
    softmax_grad_rows<T, A>(grad, y, out, end - begin, width);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("softmax(Tensor x) -> Tensor");
  m.def("softmax_grad(Tensor grad, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("softmax", TORCH_BOX(&softmax<Cpu>));
  m.impl("softmax_grad", TORCH_BOX(&softmax_grad<Cpu>));
}

}  // namespace arr_coc
