// What makes a score of a patch's entropy, salience and alignment.
#pragma once

#include "arr_coc/common/cuda.cuh"
#include "arr_coc/compute_salience/patches.cuh"
#include "arr_coc/relevance_scores/relevance_scores.h"

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
    const A edge = A(edges[sample * count() + n]);
    const A distance = mean_distance<A>(colours + sample * 3 * count(), Place(n, rows, columns));
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
};

}  // namespace arr_coc
