#include "ops/query_alignment/query_alignment.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/cosine.h"

namespace arr_coc {
namespace {

// A row's norm and the token it fits best.
template <class A>
struct Fit {
  A norm;
  Match<A> match;
};

template <class A>
Fit<A> fit(const A* row, const A* units, const bool* mask, int64_t tokens, int64_t width) {
  Fit<A> result;
  if (tokens == 1) {
    const Products<A> both = products(row, units, width);
    result.norm = std::sqrt(both.square);
    if (!mask || mask[0]) result.match.offer(0, both.dot * inverse_norm(result.norm));
  } else {
    result.norm = std::sqrt(dot(row, row, width));
    result.match = best_token(row, inverse_norm(result.norm), units, mask, tokens, width);
  }
  return result;
}

Tensor query_alignment_cpu(const Tensor& features, const Tensor& query, const std::optional<Tensor>& mask) {
  check_query_alignment(features, query, mask);
  const Tensor x = as_contiguous(features), q = as_contiguous(query);
  const std::optional<Tensor> kept = contiguous_mask(mask);
  const bool* keep = mask_data(kept);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2), tokens = q.dim() == 3 ? q.size(1) : 1;
  Tensor alignment = allocate(x, {batch, count});
  if (batch * count == 0) return alignment;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    T* out = static_cast<T*>(alignment.mutable_data_ptr());
    const UnitRows<A> queries = unit_rows<A>(static_cast<const T*>(q.const_data_ptr()), keep, batch * tokens, width);
    parallel_rows(batch * count, width * (tokens + 1), [&](int64_t begin, int64_t end) {
      std::vector<A> buffer;
      for (int64_t n = begin; n < end; ++n) {
        const int64_t base = n / count * tokens;
        const A* row = accumulated(in + n * width, width, buffer);
        const Match<A> match =
            fit(row, queries.unit.data() + base * width, keep ? keep + base : nullptr, tokens, width).match;
        out[n] = store<T>(match.token < 0 ? A(0) : (1 + match.cosine) / 2);
      }
    });
  });
  return alignment;
}

// With u the unit of the best token and c the cosine: d f = g / 2 (u - c f / |f|) / |f|; the best token's unit vector
// gets g / 2 f / |f|, which through_unit turns into the gradient of the token.
std::tuple<Tensor, Tensor> query_alignment_grad_cpu(const Tensor& grad, const Tensor& features, const Tensor& query,
                                                    const std::optional<Tensor>& mask, bool need_features,
                                                    bool need_query) {
  check_query_alignment_grad(grad, features, query, mask);
  const Tensor g = as_contiguous(grad), x = as_contiguous(features), q = as_contiguous(query);
  const std::optional<Tensor> kept = contiguous_mask(mask);
  const bool* keep = mask_data(kept);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2), tokens = q.dim() == 3 ? q.size(1) : 1;
  Tensor grad_features = need_features ? allocate(x, {batch, count, width}) : allocate(x, {0});
  Tensor grad_query = need_query ? allocate(q, q.sizes()) : allocate(q, {0});
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    const T* upstream = static_cast<const T*>(g.const_data_ptr());
    T* out = static_cast<T*>(grad_features.mutable_data_ptr());
    const UnitRows<A> queries = unit_rows<A>(static_cast<const T*>(q.const_data_ptr()), keep, batch * tokens, width);
    std::vector<A> factor(batch * count);
    std::vector<int64_t> chosen(batch * count);
    parallel_rows(batch * count, width * (tokens + 3), [&](int64_t begin, int64_t end) {
      std::vector<A> buffer;
      StagedRow<T> staged(width);
      for (int64_t n = begin; n < end; ++n) {
        const int64_t base = n / count * tokens;
        const A* row = accumulated(in + n * width, width, buffer);
        const A* units = queries.unit.data() + base * width;
        const auto [norm, match] = fit(row, units, keep ? keep + base : nullptr, tokens, width);
        const A inverse = inverse_norm(norm), scale = load(upstream[n]) / 2 * inverse,
                along = norm_passes(norm) * match.cosine * inverse;
        factor[n] = scale;
        chosen[n] = match.token;
        if (!need_features) continue;
        T* out_row = out + n * width;
        if (match.token < 0) {
          std::fill_n(out_row, width, T(0));
        } else {
          cosine_gradient(row, units + match.token * width, scale, along, staged.at(out_row), width);
          staged.store_to(out_row);
        }
      }
    });
    if (!need_query) return;
    T* query_out = static_cast<T*>(grad_query.mutable_data_ptr());
    const std::vector<A> sums = column_sums(in, factor.data(), chosen.data(), batch, count, width, tokens);
    parallel_rows(batch * tokens, width * 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * width;
        if (keep && !keep[row]) {
          std::fill_n(query_out + at, width, T(0));
        } else {
          through_unit(sums.data() + at, queries.unit.data() + at, queries.norm[row], A(1), width, query_out + at);
        }
      }
    });
  });
  return {grad_features, grad_query};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("query_alignment(Tensor features, Tensor query, Tensor? mask=None) -> Tensor");
  m.def(
      "query_alignment_grad(Tensor grad, Tensor features, Tensor query, Tensor? mask, bool need_features, "
      "bool need_query) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("query_alignment", TORCH_BOX(&query_alignment_cpu));
  m.impl("query_alignment_grad", TORCH_BOX(&query_alignment_grad_cpu));
}

}  // namespace arr_coc
