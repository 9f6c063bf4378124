#pragma once

#include <optional>
#include <tuple>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

inline void check_query_alignment(const Tensor& features, const Tensor& query, const std::optional<Tensor>& mask) {
  const char* op = "query_alignment";
  check_features(op, features);
  check(query.dim() == 2 || query.dim() == 3, op, ": query must be [B, D] or [B, T, D], got shape ", shape_of(query));
  check_alike(op, "features", features, "query", query);
  check_same_size(op, "B", "query", query.size(0), "features", features.size(0));
  check_same_size(op, "D", "query", query.size(-1), "features", features.size(2));
  if (query.dim() == 3) check(query.size(1) > 0, op, ": query must have T >= 1, got shape ", shape_of(query));
  if (!mask.has_value()) return;
  check(query.dim() == 3, op, ": mask needs a query [B, T, D], got query of shape ", shape_of(query));
  check_rank(op, "mask", *mask, 2, "[B, T]");
  check_dtype(op, "mask", *mask, ScalarType::Bool);
  check(mask->device() == features.device(), op, ": mask and features must be on one device");
  check_same_size(op, "B", "mask", mask->size(0), "query", query.size(0));
  check_same_size(op, "T", "mask", mask->size(1), "query", query.size(1));
}

// A query [B, D] is one token. `mask` may be null.
template <class T>
struct QueryAlignment {
  const T *features, *query;
  const bool* mask;
  T* out;
  int64_t batch, count, width, tokens;
};

// A null output is not computed. There may be no features.
template <class T>
struct QueryAlignmentGrad {
  const T *grad, *features, *query;
  const bool* mask;
  T *grad_features, *grad_query;
  int64_t batch, count, width, tokens;
};

inline int64_t tokens_of(const Tensor& query) { return query.dim() == 3 ? query.size(1) : 1; }

template <class Device>
Tensor query_alignment(const Tensor& features, const Tensor& query, const std::optional<Tensor>& mask) {
  check_query_alignment(features, query, mask);
  const Device device(features);
  const Tensor x = as_contiguous(features), q = as_contiguous(query);
  const std::optional<Tensor> kept = as_contiguous(mask);
  Tensor alignment = allocate(x, {x.size(0), x.size(1)});
  if (alignment.numel() == 0) return alignment;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, QueryAlignment<T>{data_of<T>(x), data_of<T>(q), data_of<bool>(kept), data_of<T>(alignment), x.size(0),
                                  x.size(1), x.size(2), tokens_of(q)});
  });
  return alignment;
}

template <class Device>
std::tuple<Tensor, Tensor> query_alignment_grad(const Tensor& grad, const Tensor& features, const Tensor& query,
                                                const std::optional<Tensor>& mask, bool need_features,
                                                bool need_query) {
  check_query_alignment(features, query, mask);
  check_patch_grad("query_alignment_grad", grad, features);
  const Device device(features);
  const Tensor g = as_contiguous(grad), x = as_contiguous(features), q = as_contiguous(query);
  const std::optional<Tensor> kept = as_contiguous(mask);
  Tensor grad_features = allocate_if(need_features, x, x.sizes()), grad_query = allocate_if(need_query, q, q.sizes());
  if (!need_features && !need_query) return {grad_features, grad_query};
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, QueryAlignmentGrad<T>{data_of<T>(g), data_of<T>(x), data_of<T>(q), data_of<bool>(kept),
                                      data_of<T>(grad_features), data_of<T>(grad_query), x.size(0), x.size(1),
                                      x.size(2), tokens_of(q)});
  });
  return {grad_features, grad_query};
}

}  // namespace arr_coc
