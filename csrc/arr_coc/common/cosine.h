// Cosines of rows with unit vectors on the CPU, and parts of their gradients. common/cosine.cuh is the same for CUDA.
#pragma once

#include <vector>

#include "arr_coc/common/convert.h"
#include "arr_coc/common/cosine_rules.h"
#include "arr_coc/common/cpu.h"

namespace arr_coc {

// Sums whose order depends on `width` alone.
template <class A>
ARR_COC_EVERY_ISA A dot(const A* x, const A* y, int64_t width) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < width; ++d) sum += x[d] * y[d];
  return sum;
}

// A row's products with itself and with another row, reading it once.
template <class A>
struct Products {
  A square, dot;
};

template <class A>
ARR_COC_EVERY_ISA Products<A> products(const A* x, const A* y, int64_t width) {
  A square = 0, dot = 0;
#pragma omp simd reduction(+ : square, dot)
  for (int64_t d = 0; d < width; ++d) {
    square += x[d] * x[d];
    dot += x[d] * y[d];
  }
  return {square, dot};
}

// The products of one row with four others.
template <class A>
ARR_COC_EVERY_ISA void dots(const A* x, const A* const (&y)[4], int64_t width, A (&sums)[4]) {
  const A *y0 = y[0], *y1 = y[1], *y2 = y[2], *y3 = y[3];
  A s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t d = 0; d < width; ++d) {
    s0 += x[d] * y0[d];
    s1 += x[d] * y1[d];
    s2 += x[d] * y2[d];
    s3 += x[d] * y3[d];
  }
  sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

// The products of four rows with four others, row by row. Each number read is used in four products.
template <class A>
ARR_COC_EVERY_ISA void dots(const A* const (&x)[4], const A* const (&y)[4], int64_t width, A (&sums)[16]) {
  const A *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3], *y0 = y[0], *y1 = y[1], *y2 = y[2], *y3 = y[3];
  A s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0, s20 = 0, s21 = 0, s22 = 0, s23 = 0, s30 = 0,
    s31 = 0, s32 = 0, s33 = 0;
#pragma omp simd reduction(+ : s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33)
  for (int64_t d = 0; d < width; ++d) {
    s00 += x0[d] * y0[d], s01 += x0[d] * y1[d], s02 += x0[d] * y2[d], s03 += x0[d] * y3[d];
    s10 += x1[d] * y0[d], s11 += x1[d] * y1[d], s12 += x1[d] * y2[d], s13 += x1[d] * y3[d];
    s20 += x2[d] * y0[d], s21 += x2[d] * y1[d], s22 += x2[d] * y2[d], s23 += x2[d] * y3[d];
    s30 += x3[d] * y0[d], s31 += x3[d] * y1[d], s32 += x3[d] * y2[d], s33 += x3[d] * y3[d];
  }
  sums[0] = s00, sums[1] = s01, sums[2] = s02, sums[3] = s03;
  sums[4] = s10, sums[5] = s11, sums[6] = s12, sums[7] = s13;
  sums[8] = s20, sums[9] = s21, sums[10] = s22, sums[11] = s23;
  sums[12] = s30, sums[13] = s31, sums[14] = s32, sums[15] = s33;
}

// Rows divided by their clamped norms, and the norms.
template <class A>
struct UnitRows {
  std::vector<A> unit, norm;
};

// `keep` may be null; a row that is not kept becomes zeros, even if it has NaN.
template <class A, class T>
UnitRows<A> unit_rows(const T* rows, const bool* keep, int64_t count, int64_t width) {
  UnitRows<A> result{std::vector<A>(count * width), std::vector<A>(count)};
  parallel_rows(count, width * 3, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (keep && !keep[row]) continue;
      A* unit = result.unit.data() + row * width;
      widen(rows + row * width, unit, width);
      result.norm[row] = std::sqrt(dot(unit, unit, width));
      const A inverse = inverse_norm(result.norm[row]);
      for (int64_t d = 0; d < width; ++d) unit[d] *= inverse;
    }
  });
  return result;
}

// `units` are the sample's query tokens, `mask` is the sample's or null.
template <class A>
Match<A> best_token(const A* row, A inverse, const A* units, const bool* mask, int64_t tokens, int64_t width) {
  Match<A> match;
  if (tokens == 1) {
    if (!mask || mask[0]) match.offer(0, dot(row, units, width) * inverse);
    return match;
  }
  for (int64_t first = 0; first < tokens; first += 4) {
    // The last four may repeat a token, because equal tokens must have equal bits at every place.
    const A* four[4];
    for (int64_t i = 0; i < 4; ++i) four[i] = units + std::min(first + i, tokens - 1) * width;
    A cosines[4];
    dots(row, four, width, cosines);
    for (int64_t i = 0; i < 4 && first + i < tokens; ++i)
      if (!mask || mask[first + i]) match.offer(first + i, cosines[i] * inverse);
  }
  return match;
}

// The gradient of a row whose cosine with `unit` is c: scale (unit - along x), along = c / |x|; `out` may be `x`.
template <class A>
ARR_COC_EVERY_ISA void cosine_gradient(const A* x, const A* unit, A scale, A along, A* out, int64_t width) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) out[d] = scale * (unit[d] - along * x[d]);
}

template <class A>
ARR_COC_EVERY_ISA void add_scaled(const A* x, A scale, A* sum, int64_t width) {
  prefetch_behind(x, width);
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) sum[d] += scale * x[d];
}

// [B, G, D]: sums over n of factor(n, row) x[b, n, :] where group[b, n] = g. `factor` is called once for each row, with
// b N + n and the row in A. A null group is 0. Chunks of rows are summed separately and then added, so that the order
// depends on N and G alone.
template <class A, class T, class F>
std::vector<A> column_sums(const T* x, const F& factor, const int64_t* group, int64_t batch, int64_t rows,
                           int64_t width, int64_t groups) {
  const int64_t chunk_rows = kColumnChunk * groups, chunks = (rows + chunk_rows - 1) / chunk_rows;
  std::vector<A> partial(batch * chunks * groups * width), sums(batch * groups * width);
  parallel_rows(batch * chunks, chunk_rows * width, [&](int64_t begin, int64_t end) {
    std::vector<A> buffer;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t sample = item / chunks, first = item % chunks * chunk_rows;
      for (int64_t n = sample * rows + first; n < sample * rows + std::min(first + chunk_rows, rows); ++n) {
        const int64_t g = group ? group[n] : 0;
        if (g < 0) continue;
        const A* row = accumulated(x + n * width, width, buffer);
        add_scaled(row, factor(n, row), partial.data() + (item * groups + g) * width, width);
      }
    }
  });
  parallel_rows(batch, chunks * groups * width, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin * chunks; item < end * chunks; ++item) {
      A* sum = sums.data() + item / chunks * groups * width;
      for (int64_t i = 0; i < groups * width; ++i) sum[i] += partial[item * groups * width + i];
    }
  });
  return sums;
}

// Computes the gradient of v times `scale` from the gradient of unit = v / max(|v|, floor). `out` may be `upstream`.
template <class A, class O>
void through_unit(const A* upstream, const A* unit, A norm, A scale, int64_t width, O* out) {
  const A inverse = inverse_norm(norm) * scale, along = norm_passes(norm) * dot(upstream, unit, width);
  for (int64_t d = 0; d < width; ++d) out[d] = store<O>(inverse * (upstream[d] - along * unit[d]));
}

}  // namespace arr_coc
