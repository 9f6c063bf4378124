#pragma once

#include <limits>
#include <optional>
#include <tuple>

#include "arr_coc/allocate_lod_tokens/allocate_lod_tokens.h"
#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"
#include "arr_coc/top_k_patches/top_k_patches.h"

namespace arr_coc {

// The patches form a grid of `rows` x `columns`.
template <class T>
struct SelectPatches {
  TopKPatches<T> selection;      // its rows are multiplied by their scores
  AllocateLodTokens<T> budgets;  // of the selected scores
  T* scores;                     // the selected ones
  float* positions;
  int64_t rows, columns;
};

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> select_patches(const Tensor& relevance_scores,
                                                                  const Tensor& features, int64_t k, int64_t rows,
                                                                  int64_t columns, int64_t min_tokens,
                                                                  int64_t max_tokens, double gamma,
                                                                  std::optional<int64_t> total) {
  const char* op = "select_patches";
  check_rank(op, "relevance_scores", relevance_scores, 2, "[B, N]");
  check_floating(op, "relevance_scores", relevance_scores);
  check_rank(op, "features", features, 3, "[B, N, D]");
  check_alike(op, "relevance_scores", relevance_scores, "features", features);
  const int64_t batch = relevance_scores.size(0), n = relevance_scores.size(1);
  check_same_size(op, "B", "features", features.size(0), "relevance_scores", batch);
  check_same_size(op, "N", "features", features.size(1), "relevance_scores", n);
  check(rows >= 0, op, ": rows must be >= 0, got ", rows);
  check(columns >= 0, op, ": columns must be >= 0, got ", columns);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const int64_t patches = columns > 0 && rows > kMost / columns ? kMost : rows * columns;
  check_same_size(op, "N", "relevance_scores", n, "the grid of patches", patches);
  check_k(op, k, n);
  check_budgets(op, k, min_tokens, max_tokens, gamma, total);
  const Device device(relevance_scores);
  const Tensor in = as_contiguous(relevance_scores), from = with_whole_rows(features);
  Tensor selected = allocate(in, {batch, k, features.size(2)}), indices = allocate(in, {batch, k}, ScalarType::Long),
         tokens = allocate(in, {batch, k}, ScalarType::Long), scores = allocate(in, {batch, k}),
         positions = allocate(in, {batch, k, 2}, ScalarType::Float);
  if (indices.numel() == 0) return {selected, indices, tokens, scores, positions};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, SelectPatches<T>{{data_of<T>(in), data_of<int64_t>(indices), rows_of(from), rows_of(selected),
                                  row_bytes(features), batch, n, k},
                                 lod_allocation<T>(data_of<T>(scores), data_of<int64_t>(tokens), batch, k, min_tokens,
                                                   max_tokens, gamma, total),
                                 data_of<T>(scores),
                                 data_of<float>(positions),
                                 rows,
                                 columns});
  });
  return {selected, indices, tokens, scores, positions};
}

}  // namespace arr_coc
