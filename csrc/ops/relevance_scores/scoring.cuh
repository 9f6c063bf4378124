// What makes a score of a patch's entropy, salience and alignment.
#pragma once

#include "common/cuda.cuh"
#include "ops/relevance_scores/relevance_scores.h"

namespace arr_coc {

// See relevance_scores.cpp for the formulas.
template <class T>
struct Scoring {
  using A = accumulate_t<T>;
  const T *colours, *edges, *weights;
  const bool* mask;  // of the one token, or null
  T* out;
  int64_t rows, columns, weight_stride;  // the grid of patches is rows x columns
  A entropy_norm, edge_weight, contrast_weight, features_weight;
  bool invert;

  Scoring() = default;

  explicit Scoring(const RelevanceScores<T>& inputs)
      : colours(inputs.colours),
        edges(inputs.edges),
        weights(inputs.weights),
        mask(inputs.mask),
        out(inputs.out),
        rows(inputs.rows),
        columns(inputs.columns),
        weight_stride(inputs.weight_stride),
        entropy_norm(inputs.entropy_norm),
        edge_weight(A(inputs.salience.edges)),
        contrast_weight(A(inputs.salience.contrast)),
        features_weight(A(inputs.salience.features)),
        invert(inputs.invert) {}

  __host__ __device__ int64_t count() const { return rows * columns; }

  // Whether the sample's one token counts.
  __device__ __forceinline__ bool keeps(int64_t sample) const { return !mask || mask[sample]; }

  // Patch n's salience, but for the features' part.
  __device__ __forceinline__ A salience(int64_t sample, int64_t n) const {
    const A edge = A(edges[sample * count() + n]), distance = contrast(colours + sample * 3 * count(), n);
    return edge_weight * (edge / (edge + A(kEdgeHalf))) + contrast_weight * (distance / (distance + A(kContrastHalf)));
  }

  // Writes a patch's score from its entropy in powers of two. `index` is the patch's among all samples'.
  __device__ __forceinline__ void write(int64_t sample, int64_t index, A bits, A salience, A alignment) const {
    const T* of_sample = weights + sample * weight_stride;
    const A w_entropy = A(of_sample[0]), w_salience = A(of_sample[1]), w_alignment = A(of_sample[2]);
    const A entropy = bits * entropy_norm;
    const A raw = (w_entropy * (invert ? 1 - entropy : entropy) + w_salience * salience + w_alignment * alignment) /
                  (w_entropy + w_salience + w_alignment);
    out[index] = T(raw < 0 ? A(0) : raw > 1 ? A(1) : raw);  // NaN stays, as in torch.clamp
  }

 private:
  // The mean colour distance of patch n from its up to 8 neighbours.
  __device__ __forceinline__ A contrast(const T* colours, int64_t n) const {
    const int64_t row = n / columns, column = n - row * columns;
    const T *l = colours, *a = l + count(), *b = a + count();
    A sum = 0;
    int neighbours = 0;
#pragma unroll
    for (int i = -1; i <= 1; ++i) {
#pragma unroll
      for (int j = -1; j <= 1; ++j) {
        const bool exists = (i || j) && row + i >= 0 && row + i < rows && column + j >= 0 && column + j < columns;
        const int64_t other = exists ? n + i * columns + j : n;
        const A dl = A(l[n]) - A(l[other]), da = A(a[n]) - A(a[other]), db = A(b[n]) - A(b[other]);
        const A distance = sqrt(dl * dl + da * da + db * db);
        sum += exists ? distance : A(0);
        neighbours += exists;
      }
    }
    return sum / A(max(neighbours, 1));
  }
};

}  // namespace arr_coc
