#pragma once

#include <optional>
#include <vector>

#include "arr_coc/common/checks.h"
#include "arr_coc/compute_entropy/compute_entropy.h"
#include "arr_coc/compute_salience/compute_salience.h"
#include "arr_coc/opponent_balance/opponent_balance.h"
#include "arr_coc/query_alignment/query_alignment.h"

namespace arr_coc {

inline void check_patch_means(const char* op, const char* name, const Tensor& means, int64_t channels,
                              const Tensor& features) {
  check(means.dim() == 4 && means.size(1) == channels, op, ": ", name, " must be [B, ", channels,
        ", gh, gw], got shape ", shape_of(means));
  check_alike(op, "features", features, name, means);
  check_same_size(op, "B", name, means.size(0), "features", features.size(0));
}

// The inputs of whole samples; their patches are `rows` x `columns`. `scale` is log2 e / temperature.
template <class T>
struct RelevanceScores {
  using A = accumulate_t<T>;
  const T *features, *query, *colours, *edges, *weights;
  const bool* mask;  // null if every token counts
  T* out;
  int64_t batch, rows, columns, width, tokens, weight_stride;
  A scale, entropy_norm;
  SalienceWeights salience;
  bool invert;
};

template <class Device>
Tensor relevance_scores(const Tensor& features, const Tensor& query, const Tensor& colours, const Tensor& edges,
                        const Tensor& weights, const std::optional<Tensor>& mask, std::vector<double> salience_weights,
                        double temperature, bool invert_entropy) {
  const char* op = "relevance_scores";
  check_compute_entropy(features, temperature);
  check_query_alignment(features, query, mask);
  check_patch_means(op, "colours", colours, 3, features);
  check_patch_means(op, "edges", edges, 1, features);
  check_same_size(op, "gh", "edges", edges.size(2), "colours", colours.size(2));
  check_same_size(op, "gw", "edges", edges.size(3), "colours", colours.size(3));
  check_same_size(op, "N", "features", features.size(1), "the grid of patches", colours.size(2) * colours.size(3));
  check_weights(op, weights, "features", features);
  check_salience_weights(op, "salience_weights", salience_weights);
  const Device device(features);
  const Tensor x = as_contiguous(features), q = as_contiguous(query), c = as_contiguous(colours),
               e = as_contiguous(edges), w = as_contiguous(weights);
  const std::optional<Tensor> kept = as_contiguous(mask);
  const int64_t width = x.size(2);
  Tensor scores = allocate(x, {x.size(0), x.size(1)});
  if (scores.numel() == 0) return scores;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    run(device, RelevanceScores<T>{data_of<T>(x), data_of<T>(q), data_of<T>(c), data_of<T>(e), data_of<T>(w),
                                   data_of<bool>(kept), data_of<T>(scores), x.size(0), c.size(2), c.size(3), width,
                                   tokens_of(q), w.dim() == 2 ? 3 : 0, A(kLog2E / temperature), A(entropy_norm(width)),
                                   SalienceWeights(salience_weights), invert_entropy});
  });
  return scores;
}

}  // namespace arr_coc
