#include "arr_coc/query_alignment/query_alignment.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/cosine.h"

namespace arr_coc {
namespace {

// Computes the norms of up to four rows of one sample and the tokens they fit best.
template <class T>
class FourRows {
 public:
  using A = accumulate_t<T>;
  const A* row[4];
  A norm[4];
  Match<A> match[4];

  // `units` are the sample's query tokens, `mask` is the sample's or null.
  void read(const T* rows, int64_t size, const A* units, const bool* mask, int64_t tokens, int64_t width) {
    for (int64_t r = 0; r < 4; ++r) {
      // The last rows may repeat one, because a row must have equal bits beside any other rows.
      row[r] = accumulated(rows + std::min(r, size - 1) * width, width, buffer_[r]);
      match[r] = {};
    }
    if (tokens == 1) {
      for (int64_t r = 0; r < size; ++r) {
        const Products<A> both = products(row[r], units, width);
        norm[r] = std::sqrt(both.square);
        if (!mask || mask[0]) match[r].offer(0, both.dot * inverse_norm(norm[r]));
      }
      return;
    }
    for (int64_t r = 0; r < size; ++r) norm[r] = std::sqrt(dot(row[r], row[r], width));
    for (int64_t first = 0; first < tokens; first += 4) {
      const A* four[4];
      for (int64_t i = 0; i < 4; ++i) four[i] = units + std::min(first + i, tokens - 1) * width;
      A cosines[16];
      dots(row, four, width, cosines);
      for (int64_t r = 0; r < size; ++r)
        for (int64_t i = 0; i < 4 && first + i < tokens; ++i)
          if (!mask || mask[first + i]) match[r].offer(first + i, cosines[4 * r + i] * inverse_norm(norm[r]));
    }
  }

 private:
  std::vector<A> buffer_[4];
};

// Calls f(n, size) for rows [n, n + size) until [begin, end) is done. Each call has up to four rows of one sample.
template <class F>
void for_four_rows(int64_t begin, int64_t end, int64_t count, const F& f) {
  for (int64_t n = begin, size; n < end; n += size) {
    size = std::min<int64_t>({4, end - n, (n / count + 1) * count - n});
    f(n, size);
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const QueryAlignment<T>& call) {
  using A = accumulate_t<T>;
  const int64_t count = call.count, width = call.width, tokens = call.tokens;
  const UnitRows<A> queries = unit_rows<A>(call.query, call.mask, call.batch * tokens, width);
  parallel_rows(call.batch * count, width * (tokens + 1), [&](int64_t begin, int64_t end) {
    FourRows<T> rows;
    for_four_rows(begin, end, count, [&](int64_t n, int64_t size) {
      const int64_t base = n / count * tokens;
      rows.read(call.features + n * width, size, queries.unit.data() + base * width,
                call.mask ? call.mask + base : nullptr, tokens, width);
      for (int64_t r = 0; r < size; ++r)
        call.out[n + r] = store<T>(rows.match[r].token < 0 ? A(0) : (1 + rows.match[r].cosine) / 2);
    });
  });
}

// With u the unit of the best token and c the cosine: d f = g / 2 (u - c f / |f|) / |f|; the best token's unit vector
// gets g / 2 f / |f|, which through_unit turns into the gradient of the token.
template <class T>
void run(const Cpu&, const QueryAlignmentGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t batch = call.batch, count = call.count, width = call.width, tokens = call.tokens;
  const UnitRows<A> queries = unit_rows<A>(call.query, call.mask, batch * tokens, width);
  std::vector<A> factor(batch * count);
  std::vector<int64_t> chosen(batch * count);
  parallel_rows(batch * count, width * (tokens + 3), [&](int64_t begin, int64_t end) {
    FourRows<T> rows;
    StagedRow<T> staged(width);
    for_four_rows(begin, end, count, [&](int64_t first, int64_t size) {
      const int64_t base = first / count * tokens;
      const A* units = queries.unit.data() + base * width;
      rows.read(call.features + first * width, size, units, call.mask ? call.mask + base : nullptr, tokens, width);
      for (int64_t r = 0; r < size; ++r) {
        const int64_t n = first + r, token = rows.match[r].token;
        const A inverse = inverse_norm(rows.norm[r]), scale = load(call.grad[n]) / 2 * inverse,
                along = norm_passes(rows.norm[r]) * rows.match[r].cosine * inverse;
        factor[n] = scale;
        chosen[n] = token;
        if (!call.grad_features) continue;
        T* out_row = call.grad_features + n * width;
        if (token < 0) {
          std::fill_n(out_row, width, T(0));
        } else {
          cosine_gradient(rows.row[r], units + token * width, scale, along, staged.at(out_row), width);
          staged.store_to(out_row);
        }
      }
    });
  });
  if (!call.grad_query) return;
  const auto factor_of = [&](int64_t n, const A*) { return factor[n]; };
  const std::vector<A> sums = column_sums<A>(call.features, factor_of, chosen.data(), batch, count, width, tokens);
  parallel_rows(batch * tokens, width * 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * width;
      if (call.mask && !call.mask[row]) {
        std::fill_n(call.grad_query + at, width, T(0));
      } else {
        through_unit(sums.data() + at, queries.unit.data() + at, queries.norm[row], A(1), width, call.grad_query + at);
      }
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("query_alignment(Tensor features, Tensor query, Tensor? mask=None) -> Tensor");
  m.def(
      "query_alignment_grad(Tensor grad, Tensor features, Tensor query, Tensor? mask, bool need_features, "
      "bool need_query) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("query_alignment", TORCH_BOX(&query_alignment<Cpu>));
  m.impl("query_alignment_grad", TORCH_BOX(&query_alignment_grad<Cpu>));
}

}  // namespace arr_coc
