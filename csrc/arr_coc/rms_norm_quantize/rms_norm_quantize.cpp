#include "arr_coc/rms_norm_quantize/rms_norm_quantize.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "arr_coc/common/convert.h"

namespace arr_coc {
namespace {

constexpr int64_t kBlock =
    1024;  // so many squares are added in A: more would lose digits, with fewer lanes more of them

// products = x weight, which may be x. Returns the sum of squares of x and the largest |product|; NaN wins.
template <class A>
ARR_COC_EVERY_ISA std::pair<A, A> look_at(const A* x, const A* weight, A* products, int64_t width) {
  A squares = 0, top = 0, nans = 0;
#pragma omp simd reduction(+ : squares, nans) reduction(max : top)
  for (int64_t d = 0; d < width; ++d) {
    const A value = x[d], product = value * weight[d], size = product < 0 ? -product : product;
    products[d] = product;
    squares += value * value;
    nans += size != size ? A(1) : A(0);
    top = size > top ? size : top;
  }
  return {squares, nans > 0 ? A(NAN) : top};
}

// |products factor| exceeds 127 by rounding errors at most, so after rounding to even it needs no clamp.
template <class A>
ARR_COC_EVERY_ISA void quantize(const A* products, A factor, int8_t* quantized, int64_t width) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) quantized[d] = int8_t(int(std::nearbyint(products[d] * factor)));
}

}  // namespace

template <class T>
void run(const Cpu&, const RmsNormQuantize<T>& call) {
  using A = accumulate_t<T>;
  const int64_t width = call.width;
  std::vector<A> weight_buffer;
  const A* weight = accumulated(call.weight, width, weight_buffer);
  parallel_rows(call.rows, width * 2, [&](int64_t begin, int64_t end) {
    std::vector<A> products(width);
    for (int64_t row = begin; row < end; ++row) {
      const A* values = accumulated(call.x + row * width, width, products);
      double squares = 0;
      A top = 0;
      for (int64_t d = 0; d < width; d += kBlock) {
        const auto [part, size] = look_at(values + d, weight + d, products.data() + d, std::min(kBlock, width - d));
        squares += part;
        top = size > top || size != size ? size : top;
      }
      const A inverse_rms = A(1 / std::sqrt(squares / double(width) + call.eps));
      const A amax = top > 0 ? top * inverse_rms : top;  // a row of zeros stays zero even if 1 / rms is infinite
      const float step = float(amax / A(kQuantizedMax));
      call.scale[row] = step < kScaleMin ? 0 : step;
      int8_t* quantized = call.quantized + row * width;
      if (step >= kScaleMin && step < INFINITY) {
        quantize(products.data(), inverse_rms / A(step), quantized, width);
      } else {
        std::fill_n(quantized, width, int8_t(0));
      }
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("rms_norm_quantize(Tensor x, Tensor weight, float eps=1e-06) -> (Tensor quantized, Tensor scale)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("rms_norm_quantize", TORCH_BOX(&rms_norm_quantize<Cpu>)); }

}  // namespace arr_coc
