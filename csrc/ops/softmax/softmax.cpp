#include "ops/softmax/softmax.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/exponential.h"
#include "common/map.h"

namespace arr_coc {
namespace {

// Elements of a block: one sum over a row of 100000 would lose four digits.
constexpr int64_t kBlock = 2048;
// Rows are computed on in whole vectors, of any processor and type: the exponential of one element that is left over
// takes as long as that of all in a vector.
constexpr int64_t kWhole = 16;

// Over a multiple of kWhole elements; `out` may be `x`. The greatest passes over NaN, which shows in the sum.
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

template <class T, class A>
ARR_COC_EVERY_ISA A sum_of_products(const T* x, const T* y, int64_t width) {
  A total = 0;
  for (int64_t at = 0; at < width; at += kBlock) {
    const int64_t end = std::min(at + kBlock, width);
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = at; d < end; ++d) sum += A(load(x[d])) * A(load(y[d]));
    total += sum;
  }
  return total;
}

#ifdef ARR_COC_F16C
// That of all elements that fill vectors, of which there are `count`.
ARR_COC_F16C float sum_of_products(const Half* x, const Half* y, int64_t width, int64_t& count) {
  constexpr int kSums = 4;  // an addition starts before the last one is done
  Eight total[kSums] = {};
  for (count = 0; count + 8 * kSums <= width; count += 8 * kSums) {
    for (int k = 0; k < kSums; ++k) {
      const Eight a = load_eight(x + count + 8 * k), b = load_eight(y + count + 8 * k);
#pragma omp simd
      for (int j = 0; j < 8; ++j) total[k].values[j] += a.values[j] * b.values[j];
    }
  }
  float sum = 0;
  for (int j = 0; j < 8; ++j)
    sum += (total[0].values[j] + total[1].values[j]) + (total[2].values[j] + total[3].values[j]);
  return sum;
}
#endif

template <class A>
struct SoftmaxGrad {
  A sum;
  ARR_COC_FUNCTION A operator()(A grad, A output) const { return output * (grad - sum); }
};

Tensor softmax_cpu(const Tensor& x) {
  check_softmax(x);
  const Tensor in = as_contiguous(x);
  Tensor out = allocate(in, in.sizes());
  if (in.numel() == 0) return out;
  const int64_t width = in.size(in.dim() - 1), rows = in.numel() / width;
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* from = static_cast<const T*>(in.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    parallel_rows(rows, width * 8, [&](int64_t begin, int64_t end) {
      const int64_t vectors = (width + kWhole - 1) / kWhole;
      if constexpr (std::is_same_v<T, A>) {
        if (vectors * kWhole == width) {
          for (int64_t at = begin * width; at < end * width; at += width) softmax_vectors(from + at, to + at, vectors);
          return;
        }
      }
      std::vector<A> buffer(vectors * kWhole);
      for (int64_t at = begin * width; at < end * width; at += width) {
        widen(from + at, buffer.data(), width);
        std::fill(buffer.begin() + width, buffer.end(), A(-INFINITY));
        softmax_vectors<A>(buffer.data(), buffer.data(), vectors);
        narrow(buffer.data(), to + at, width);
      }
    });
  });
  return out;
}

// With y the output: y (grad - sum of grad y).
Tensor softmax_grad_cpu(const Tensor& grad, const Tensor& output) {
  check_softmax_grad(grad, output);
  const Tensor g = as_contiguous(grad), o = as_contiguous(output);
  Tensor out = allocate(o, o.sizes());
  if (o.numel() == 0) return out;
  const int64_t width = o.size(o.dim() - 1), rows = o.numel() / width;
  dispatch_floating(o.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* upstream = static_cast<const T*>(g.const_data_ptr());
    const T* y = static_cast<const T*>(o.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    parallel_rows(rows, width * 4, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * width; at < end * width; at += width) {
        A sum = 0;
        int64_t done = 0;
#ifdef ARR_COC_F16C
        if constexpr (std::is_same_v<T, Half>)
          if (has_f16c()) sum = sum_of_products(upstream + at, y + at, width, done);
#endif
        sum += sum_of_products<T, A>(upstream + at + done, y + at + done, width - done);
        map(SoftmaxGrad<A>{sum}, to + at, width, upstream + at, y + at);
      }
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("softmax(Tensor x) -> Tensor");
  m.def("softmax_grad(Tensor grad, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("softmax", TORCH_BOX(&softmax_cpu));
  m.impl("softmax_grad", TORCH_BOX(&softmax_grad_cpu));
}

}  // namespace arr_coc
