#pragma once

#include <optional>
#include <vector>

#include "common/checks.h"
#include "ops/compute_entropy/compute_entropy.h"
#include "ops/compute_salience/compute_salience.h"
#include "ops/query_alignment/query_alignment.h"

namespace arr_coc {

inline void check_patch_means(const char* op, const char* name, const Tensor& means, int64_t channels,
                              const Tensor& features) {
  check(means.dim() == 4 && means.size(1) == channels, op, ": ", name, " must be [B, ", channels,
        ", gh, gw], got shape ", shape_of(means));
  check_alike(op, "features", features, name, means);
  check_same_size(op, "B", name, means.size(0), "features", features.size(0));
}

inline void check_relevance_scores(const Tensor& features, const Tensor& query, const Tensor& colours,
                                   const Tensor& edges, const Tensor& weights, const std::optional<Tensor>& mask,
                                   const std::vector<double>& salience_weights, double temperature) {
  const char* op = "relevance_scores";
  check_compute_entropy(features, temperature);
  check_query_alignment(features, query, mask);
  check_patch_means(op, "colours", colours, 3, features);
  check_patch_means(op, "edges", edges, 1, features);
  check_same_size(op, "gh", "edges", edges.size(2), "colours", colours.size(2));
  check_same_size(op, "gw", "edges", edges.size(3), "colours", colours.size(3));
  check_same_size(op, "N", "features", features.size(1), "the grid of patches", colours.size(2) * colours.size(3));
  check((weights.dim() == 1 || weights.dim() == 2) && weights.size(-1) == 3, op,
        ": weights must be [3] or [B, 3], got shape ", shape_of(weights));
  check_alike(op, "features", features, "weights", weights);
  if (weights.dim() == 2) check_same_size(op, "B", "weights", weights.size(0), "features", features.size(0));
  check_salience_weights(op, "salience_weights", salience_weights);
}

}  // namespace arr_coc
