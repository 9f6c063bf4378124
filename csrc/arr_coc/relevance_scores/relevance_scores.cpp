#include "arr_coc/relevance_scores/relevance_scores.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/cosine.h"
#include "arr_coc/common/exponential.h"

namespace arr_coc {
namespace {

// The results of one pass over a row: the parts of its entropy in powers of two (see compute_entropy.cpp), its squared
// norm and its product with a vector.
template <class A>
struct RowSums {
  A sum, weighted, square, product;

  A bits() const { return std::log2(sum) - weighted / sum; }
};

// If Columns is true, adds the row to `columns`.
template <bool Columns, class A>
ARR_COC_EVERY_ISA void sum_row(const A* row, const A* other, A* columns, int64_t width, A scale, RowSums<A>& out) {
  A max = -INFINITY;
#pragma omp simd reduction(max : max)
  for (int64_t d = 0; d < width; ++d) max = row[d] > max ? row[d] : max;  // NaN shows in the sums
  A sum = 0, weighted = 0, square = 0, product = 0;
#pragma omp simd reduction(+ : sum, weighted, square, product)
  for (int64_t d = 0; d < width; ++d) {
    const A x = row[d], shifted = (x - max) * scale, weight = power_of_two(shifted);
    sum += weight;
    weighted += weight * (shifted < A(-1e4) ? A(-1e4) : shifted);  // 0 * -inf is 0 here: lim p log p
    square += x * x;
    product += x * other[d];
    if constexpr (Columns) columns[d] += x;
  }
  out = {sum, weighted, square, product};
}

// Processes one sample's rows in chunks and adds the chunks' sums in order: the order depends on N and D alone.
template <class T, class A>
struct SampleScores {
  RelevanceScores<T> of;     // with pointers to this sample's part
  const A *units, *weights;  // the query's tokens and how entropy, salience and alignment weigh
  bool needs_mean;
  A *base, *inverse, *partial, *mean;  // [N], [N], [chunks, D], [D]

  int64_t count() const { return of.rows * of.columns; }
  int64_t chunks() const { return (count() + kColumnChunk - 1) / kColumnChunk; }

  // The mean colour distance of patch n from its neighbours.
  A contrast(int64_t n) const {
    const int64_t row = n / of.columns, column = n % of.columns;
    A distance = 0;
    int neighbours = 0;
    for (int64_t i = std::max<int64_t>(row - 1, 0); i <= row + 1 && i < of.rows; ++i) {
      for (int64_t j = std::max<int64_t>(column - 1, 0); j <= column + 1 && j < of.columns; ++j) {
        if (i == row && j == column) continue;
        A square = 0;
        for (int64_t c = 0; c < 3; ++c) {
          const A difference = A(of.colours[c * count() + n]) - A(of.colours[c * count() + i * of.columns + j]);
          square += difference * difference;
        }
        distance += std::sqrt(square);
        ++neighbours;
      }
    }
    return neighbours > 0 ? distance / A(neighbours) : A(0);
  }

  A balanced(A raw) const {
    raw /= weights[0] + weights[1] + weights[2];
    return raw < 0 ? A(0) : raw > 1 ? A(1) : raw;  // NaN stays, as in torch.clamp
  }

  // Calls f(n, row) for the rows of a chunk, in the computing type.
  template <class F>
  void for_rows(int64_t chunk, std::vector<A>& buffer, const F& f) const {
    for (int64_t n = chunk * kColumnChunk; n < std::min((chunk + 1) * kColumnChunk, count()); ++n)
      f(n, accumulated(of.features + n * of.width, of.width, buffer));
  }

  // Computes everything except the rows' difference from the mean, and the chunk's part of the mean.
  void read(int64_t chunk, std::vector<A>& buffer) const {
    const SalienceWeights& salience = of.salience;
    const int64_t width = of.width;
    A* sums = needs_mean ? partial + chunk * width : nullptr;
    if (sums) std::fill_n(sums, width, A(0));
    for_rows(chunk, buffer, [&](int64_t n, const A* row) {
      RowSums<A> found;
      needs_mean ? sum_row<true>(row, units, sums, width, of.scale, found)
                 : sum_row<false>(row, units, sums, width, of.scale, found);
      const A entropy = found.bits() * of.entropy_norm, inverted = inverse_norm(std::sqrt(found.square));
      Match<A> match;
      if (of.tokens == 1) {
        if (!of.mask || of.mask[0]) match.offer(0, found.product * inverted);
      } else {
        match = best_token(row, inverted, units, of.mask, of.tokens, width);
      }
      const A alignment = match.token < 0 ? A(0) : (1 + match.cosine) / 2;
      const A edge = A(of.edges[n]), distance = contrast(n);
      const A stands_out = A(salience.edges) * (edge / (edge + A(kEdgeHalf))) +
                           A(salience.contrast) * (distance / (distance + A(kContrastHalf)));
      const A raw = weights[0] * (of.invert ? 1 - entropy : entropy) + weights[1] * stands_out + weights[2] * alignment;
      if (needs_mean) {
        base[n] = raw, inverse[n] = inverted;
      } else {
        of.out[n] = T(balanced(raw));
      }
    });
  }

  void find_mean() const {
    std::fill_n(mean, of.width, A(0));
    for (int64_t chunk = 0; chunk < chunks(); ++chunk)
      for (int64_t d = 0; d < of.width; ++d) mean[d] += partial[chunk * of.width + d];
    for (int64_t d = 0; d < of.width; ++d) mean[d] /= A(count());
    const A inverted = inverse_norm(std::sqrt(dot(mean, mean, of.width)));
    for (int64_t d = 0; d < of.width; ++d) mean[d] *= inverted;
  }

  void finish(int64_t chunk, std::vector<A>& buffer) const {
    for_rows(chunk, buffer, [&](int64_t n, const A* row) {
      const A cosine = dot(row, mean, of.width) * inverse[n];
      of.out[n] = T(balanced(base[n] + weights[1] * A(of.salience.features) * (1 - cosine) / 2));
    });
  }
};

}  // namespace

template <class T>
void run(const Cpu&, const RelevanceScores<T>& call) {
  using A = accumulate_t<T>;
  const int64_t batch = call.batch, count = call.rows * call.columns, width = call.width, tokens = call.tokens;
  const UnitRows<A> queries = unit_rows<A>(call.query, call.mask, batch * tokens, width);
  const bool needs_mean = call.salience.features > 0;
  const int64_t chunks = (count + kColumnChunk - 1) / kColumnChunk;
  // A sample's share of the memory: its weights, and where they are needed base, inverse, partial and mean.
  const int64_t share = 3 + (needs_mean ? 2 * count + (chunks + 1) * width : 0);
  std::vector<A> memory(batch * share);
  const auto sample_scores = [&](int64_t sample) {
    RelevanceScores<T> of = call;
    of.features += sample * count * width, of.colours += sample * 3 * count, of.edges += sample * count;
    of.out += sample * count;
    if (of.mask) of.mask += sample * tokens;
    A* own = memory.data() + sample * share;
    for (int64_t i = 0; i < 3; ++i) own[i] = A(call.weights[sample * call.weight_stride + i]);
    A *base = own + 3, *inverse = base + count, *partial = inverse + count, *mean = partial + chunks * width;
    const A* units = queries.unit.data() + sample * tokens * width;
    return SampleScores<T, A>{of, units, own, needs_mean, base, inverse, partial, mean};
  };
  // Whole samples side by side leave the second read to the cache; fewer samples than threads share theirs.
  const bool side_by_side = batch >= torch::stable::get_num_threads();
  const auto over_chunks = [&](const auto& f) {
    const auto some = [&](int64_t begin, int64_t end) {
      std::vector<A> buffer;
      for (int64_t chunk = begin; chunk < end; ++chunk) f(chunk, buffer);
    };
    side_by_side ? some(0, chunks) : parallel_rows(chunks, kColumnChunk * width * 8, some);
  };
  const auto score = [&](int64_t begin, int64_t end) {
    for (int64_t sample = begin; sample < end; ++sample) {
      const SampleScores<T, A> scorer = sample_scores(sample);
      over_chunks([&](int64_t chunk, std::vector<A>& buffer) { scorer.read(chunk, buffer); });
      if (!needs_mean) continue;
      scorer.find_mean();
      over_chunks([&](int64_t chunk, std::vector<A>& buffer) { scorer.finish(chunk, buffer); });
    }
  };
  side_by_side ? parallel_rows(batch, count * width * 8, score) : score(0, batch);
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "relevance_scores(Tensor features, Tensor query, Tensor colours, Tensor edges, Tensor weights, "
      "Tensor? mask=None, float[3] salience_weights=[0.5, 0.25, 0.25], float temperature=1.0, "
      "bool invert_entropy=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("relevance_scores", TORCH_BOX(&relevance_scores<Cpu>)); }

}  // namespace arr_coc
