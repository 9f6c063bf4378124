#include "ops/opponent_balance/opponent_balance.h"

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "common/cpu.h"

namespace arr_coc {
namespace {

// One sample's weights: scores are balanced as (c e + p s + f a) / sum.
template <class A>
struct Balance {
  A c, p, f, sum;

  template <class T>
  explicit Balance(const T* weights) : c(weights[0]), p(weights[1]), f(weights[2]), sum(c + p + f) {}

  A operator()(A e, A s, A a) const { return (c * e + p * s + f * a) / sum; }
};

// Calls f(sample, chunk, begin, end) for each chunk of each sample; [begin, end) indexes the flat [B, N].
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

Tensor opponent_balance_cpu(const Tensor& entropy, const Tensor& salience, const Tensor& alignment,
                            const Tensor& weights, bool invert_entropy) {
  check_opponent_balance(entropy, salience, alignment, weights);
  const Tensor e = torch::stable::contiguous(entropy), s = torch::stable::contiguous(salience),
               a = torch::stable::contiguous(alignment), w = torch::stable::contiguous(weights);
  const int64_t batch = e.size(0), count = e.size(1), weight_stride = w.dim() == 2 ? 3 : 0;
  Tensor scores = torch::stable::new_empty(e, {batch, count});
  dispatch_floating(e.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* e_in = static_cast<const T*>(e.const_data_ptr());
    const T* s_in = static_cast<const T*>(s.const_data_ptr());
    const T* a_in = static_cast<const T*>(a.const_data_ptr());
    const T* w_in = static_cast<const T*>(w.const_data_ptr());
    T* out = static_cast<T*>(scores.mutable_data_ptr());
    parallel_chunks(batch, count, [&](int64_t sample, int64_t, int64_t begin, int64_t end) {
      const Balance<A> balance(w_in + sample * weight_stride);
      for (int64_t i = begin; i < end; ++i) {
        const A raw = balance(invert_entropy ? 1 - A(e_in[i]) : A(e_in[i]), A(s_in[i]), A(a_in[i]));
        out[i] = T(raw < 0 ? A(0) : raw > 1 ? A(1) : raw);  // NaN stays, as in torch.clamp
      }
    });
  });
  return scores;
}

// With raw = (c e + p s + f a) / sum and slope = grad / sum where 0 <= raw <= 1, else 0 / sum (torch.clamp's rule):
// d e = slope c (or its negative), d c = sum over N of slope (e - raw); likewise the other two.
std::tuple<Tensor, Tensor, Tensor, Tensor> opponent_balance_grad_cpu(const Tensor& grad, const Tensor& entropy,
                                                                     const Tensor& salience, const Tensor& alignment,
                                                                     const Tensor& weights, bool invert_entropy,
                                                                     bool need_entropy, bool need_salience,
                                                                     bool need_alignment, bool need_weights) {
  check_opponent_balance_grad(grad, entropy, salience, alignment, weights);
  const Tensor g = torch::stable::contiguous(grad), e = torch::stable::contiguous(entropy),
               s = torch::stable::contiguous(salience), a = torch::stable::contiguous(alignment),
               w = torch::stable::contiguous(weights);
  const int64_t batch = e.size(0), count = e.size(1), weight_stride = w.dim() == 2 ? 3 : 0;
  const auto scores_or_nothing = [&](bool needed) {
    return needed ? torch::stable::new_empty(e, {batch, count}) : torch::stable::new_empty(e, {0});
  };
  Tensor grad_e = scores_or_nothing(need_entropy), grad_s = scores_or_nothing(need_salience),
         grad_a = scores_or_nothing(need_alignment);
  Tensor grad_w = need_weights ? torch::stable::new_empty(w, w.sizes()) : torch::stable::new_empty(w, {0});
  dispatch_floating(e.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* g_in = static_cast<const T*>(g.const_data_ptr());
    const T* e_in = static_cast<const T*>(e.const_data_ptr());
    const T* s_in = static_cast<const T*>(s.const_data_ptr());
    const T* a_in = static_cast<const T*>(a.const_data_ptr());
    const T* w_in = static_cast<const T*>(w.const_data_ptr());
    T* e_out = static_cast<T*>(grad_e.mutable_data_ptr());
    T* s_out = static_cast<T*>(grad_s.mutable_data_ptr());
    T* a_out = static_cast<T*>(grad_a.mutable_data_ptr());
    const int64_t chunks = (count + kBalanceChunk - 1) / kBalanceChunk;
    std::vector<A> partial(need_weights ? batch * chunks * 3 : 0);
    parallel_chunks(batch, count, [&](int64_t sample, int64_t item, int64_t begin, int64_t end) {
      const Balance<A> balance(w_in + sample * weight_stride);
      A sum_c = 0, sum_p = 0, sum_f = 0;
      for (int64_t i = begin; i < end; ++i) {
        const A x = invert_entropy ? 1 - A(e_in[i]) : A(e_in[i]), y = A(s_in[i]), z = A(a_in[i]);
        const A raw = balance(x, y, z), slope = (raw >= 0 && raw <= 1 ? A(g_in[i]) : A(0)) / balance.sum;
        if (need_entropy) e_out[i] = T(invert_entropy ? -slope * balance.c : slope * balance.c);
        if (need_salience) s_out[i] = T(slope * balance.p);
        if (need_alignment) a_out[i] = T(slope * balance.f);
        sum_c += slope * (x - raw);
        sum_p += slope * (y - raw);
        sum_f += slope * (z - raw);
      }
      if (need_weights) partial[item * 3] = sum_c, partial[item * 3 + 1] = sum_p, partial[item * 3 + 2] = sum_f;
    });
    if (!need_weights) return;
    T* w_out = static_cast<T*>(grad_w.mutable_data_ptr());
    const int64_t rows = weight_stride ? batch : 1, per_row = weight_stride ? chunks : batch * chunks;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < 3; ++k) {
        A sum = 0;
        for (int64_t item = row * per_row; item < (row + 1) * per_row; ++item) sum += partial[item * 3 + k];
        w_out[row * 3 + k] = T(sum);
      }
    }
  });
  return {grad_e, grad_s, grad_a, grad_w};
}

}  // namespace

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
  m.impl("opponent_balance", TORCH_BOX(&opponent_balance_cpu));
  m.impl("opponent_balance_grad", TORCH_BOX(&opponent_balance_grad_cpu));
}

}  // namespace arr_coc
