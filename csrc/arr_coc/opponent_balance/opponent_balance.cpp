#include "arr_coc/opponent_balance/opponent_balance.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "arr_coc/common/convert.h"
#include "arr_coc/common/lanes.h"

namespace arr_coc {
namespace {

constexpr int64_t kBlock = 512;  // numbers converted at once, which stay in the first cache

template <class A>
ARR_COC_EVERY_ISA void balance_block(const A* e, const A* s, const A* a, A* out, int64_t size, Balance<A> balance,
                                     bool invert) {
  const A sign = invert ? -1 : 1, offset = invert ? 1 : 0;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const A raw = balance(offset + sign * e[i], s[i], a[i]), positive = raw < 0 ? A(0) : raw;
    out[i] = positive > 1 ? A(1) : positive;  // NaN stays, as in torch.clamp
  }
}

// With raw = (c e + p s + f a) / sum and slope = grad / sum where 0 <= raw <= 1, else 0 / sum:
// d e = slope c (or its negative), d c = sum over N of slope (e - raw); the same for the other two. Each sum has kLanes
// parts, element i in part i % kLanes. Null outputs are not computed.
template <class A>
struct PartialSums {
  A c[kLanes] = {}, p[kLanes] = {}, f[kLanes] = {};
};

template <class A>
ARR_COC_EVERY_ISA void balance_grad_block(const A* g, const A* e, const A* s, const A* a, A* grad_e, A* grad_s,
                                          A* grad_a, PartialSums<A>& sums, int64_t size, Balance<A> balance,
                                          bool invert) {
  const A sign = invert ? -1 : 1, offset = invert ? 1 : 0, slope_e = sign * balance.c;
  const auto element = [&](int64_t i, int64_t lane) __attribute__((always_inline)) {
    const A x = offset + sign * e[i], raw = balance(x, s[i], a[i]);
    const A slope = ((raw >= 0) & (raw <= 1) ? g[i] : A(0)) / balance.sum;
    sums.c[lane] += slope * (x - raw);
    sums.p[lane] += slope * (s[i] - raw);
    sums.f[lane] += slope * (a[i] - raw);
    grad_a[i] = slope * balance.f;
    grad_s[i] = slope * balance.p;
    grad_e[i] = slope * slope_e;
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) element(i + lane, lane);
  }
  for (int64_t lane = 0; i < size; ++i, ++lane) element(i, lane);
}

// Calls f(sample, item, begin, end) for each chunk, number `item` of all samples'; [begin, end) indexes the flat [B,
// N].
template <class F>
void parallel_chunks(int64_t batch, int64_t count, const F& f) {
  const int64_t chunks = (count + kBalanceChunk - 1) / kBalanceChunk;
  parallel_rows(batch * chunks, std::min(count, kBalanceChunk) * 4, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t sample = item / chunks, chunk = item % chunks, begin = chunk * kBalanceChunk;
      f(sample, item, sample * count + begin, sample * count + std::min(begin + kBalanceChunk, count));
    }
  });
}

}  // namespace

template <class T>
void run(const Cpu&, const OpponentBalance<T>& call) {
  using A = accumulate_t<T>;
  parallel_chunks(call.batch, call.count, [&](int64_t sample, int64_t, int64_t begin, int64_t end) {
    const Balance<A> balance(call.weights + sample * call.weight_stride);
    if constexpr (std::is_same_v<T, A>)
      return balance_block(call.entropy + begin, call.salience + begin, call.alignment + begin, call.out + begin,
                           end - begin, balance, call.invert);
    A e[kBlock], s[kBlock], a[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t n = std::min(kBlock, end - i);
      balance_block(accumulated(call.entropy + i, n, e), accumulated(call.salience + i, n, s),
                    accumulated(call.alignment + i, n, a), e, n, balance, call.invert);
      narrow(e, call.out + i, n);
    }
  });
}

template <class T>
void run(const Cpu&, const OpponentBalanceGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t items = call.batch * call.chunks();
  std::vector<A> partial(call.grad_weights ? items * 3 : 0);
  parallel_chunks(call.batch, call.count, [&](int64_t sample, int64_t item, int64_t begin, int64_t end) {
    const Balance<A> balance(call.weights + sample * call.weight_stride);
    PartialSums<A> sums;
    A g[kBlock], e[kBlock], s[kBlock], a[kBlock], of_e[kBlock], of_s[kBlock], of_a[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t n = std::min(kBlock, end - i);
      balance_grad_block(accumulated(call.grad + i, n, g), accumulated(call.entropy + i, n, e),
                         accumulated(call.salience + i, n, s), accumulated(call.alignment + i, n, a), of_e, of_s, of_a,
                         sums, n, balance, call.invert);
      if (call.grad_entropy) narrow(of_e, call.grad_entropy + i, n);
      if (call.grad_salience) narrow(of_s, call.grad_salience + i, n);
      if (call.grad_alignment) narrow(of_a, call.grad_alignment + i, n);
    }
    for (int64_t lane = 0; call.grad_weights && lane < kLanes; ++lane) {
      partial[item * 3] += sums.c[lane];
      partial[item * 3 + 1] += sums.p[lane];
      partial[item * 3 + 2] += sums.f[lane];
    }
  });
  if (!call.grad_weights) return;
  const int64_t rows = call.weight_stride ? call.batch : 1, per_row = items / rows;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < 3; ++k) {
      A sum = 0;
      for (int64_t item = row * per_row; item < (row + 1) * per_row; ++item) sum += partial[item * 3 + k];
      call.grad_weights[row * 3 + k] = T(sum);
    }
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "opponent_balance(Tensor entropy, Tensor salience, Tensor alignment, Tensor weights, bool invert_entropy=False) "
      "-> Tensor");
  m.def(
      "opponent_balance_grad(Tensor grad, Tensor entropy, Tensor salience, Tensor alignment, Tensor weights, "
      "bool invert_entropy, bool need_entropy, bool need_salience, bool need_alignment, bool need_weights) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("opponent_balance", TORCH_BOX(&opponent_balance<Cpu>));
  m.impl("opponent_balance_grad", TORCH_BOX(&opponent_balance_grad<Cpu>));
}

}  // namespace arr_coc
