#pragma once

#include <tuple>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

// The size of a chunk of a sample's scores on both devices. So the order in which a weight's gradient is summed depends
// on N alone, not on B or the number of threads.
constexpr int64_t kBalanceChunk = 2048;

inline void check_scores(const char* op, const char* name, const Tensor& scores, const Tensor& entropy) {
  check_rank(op, name, scores, 2, "[B, N]");
  check_alike(op, "entropy", entropy, name, scores);
  check_same_size(op, "B", name, scores.size(0), "entropy", entropy.size(0));
  check_same_size(op, "N", name, scores.size(1), "entropy", entropy.size(1));
}

// Checks the weights that a sample's scores are balanced with.
inline void check_weights(const char* op, const Tensor& weights, const char* first_name, const Tensor& first) {
  check((weights.dim() == 1 || weights.dim() == 2) && weights.size(-1) == 3, op,
        ": weights must be [3] or [B, 3], got shape ", shape_of(weights));
  check_alike(op, first_name, first, "weights", weights);
  if (weights.dim() == 2) check_same_size(op, "B", "weights", weights.size(0), first_name, first.size(0));
}

inline void check_opponent_balance(const Tensor& entropy, const Tensor& salience, const Tensor& alignment,
                                   const Tensor& weights) {
  const char* op = "opponent_balance";
  check_rank(op, "entropy", entropy, 2, "[B, N]");
  check_floating(op, "entropy", entropy);
  check_scores(op, "salience", salience, entropy);
  check_scores(op, "alignment", alignment, entropy);
  check_weights(op, weights, "entropy", entropy);
}

// One sample's weights: scores are balanced as (c e + p s + f a) / sum.
template <class A>
struct Balance {
  A c, p, f, sum;

  template <class T>
  ARR_COC_FUNCTION explicit Balance(const T* weights) : c(weights[0]), p(weights[1]), f(weights[2]), sum(c + p + f) {}

  ARR_COC_FUNCTION A operator()(A e, A s, A a) const { return (c * e + p * s + f * a) / sum; }
};

template <class T>
struct OpponentBalance {
  const T *entropy, *salience, *alignment, *weights;
  T* out;
  int64_t batch, count, weight_stride;
  bool invert;
};

// A null output is not computed.
template <class T>
struct OpponentBalanceGrad {
  const T *grad, *entropy, *salience, *alignment, *weights;
  T *grad_entropy, *grad_salience, *grad_alignment, *grad_weights;
  int64_t batch, count, weight_stride;
  bool invert;

  int64_t chunks() const { return (count + kBalanceChunk - 1) / kBalanceChunk; }
};

template <class Device>
Tensor opponent_balance(const Tensor& entropy, const Tensor& salience, const Tensor& alignment, const Tensor& weights,
                        bool invert_entropy) {
  check_opponent_balance(entropy, salience, alignment, weights);
  const Device device(entropy);
  const Tensor e = as_aligned(entropy), s = as_aligned(salience), a = as_aligned(alignment), w = as_contiguous(weights);
  Tensor scores = allocate(e, e.sizes());
  if (e.numel() == 0) return scores;
  dispatch_floating(e.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, OpponentBalance<T>{data_of<T>(e), data_of<T>(s), data_of<T>(a), data_of<T>(w), data_of<T>(scores),
                                   e.size(0), e.size(1), w.dim() == 2 ? 3 : 0, invert_entropy});
  });
  return scores;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> opponent_balance_grad(const Tensor& grad, const Tensor& entropy,
                                                                 const Tensor& salience, const Tensor& alignment,
                                                                 const Tensor& weights, bool invert_entropy,
                                                                 bool need_entropy, bool need_salience,
                                                                 bool need_alignment, bool need_weights) {
  check_opponent_balance(entropy, salience, alignment, weights);
  check_scores("opponent_balance_grad", "grad", grad, entropy);
  const Device device(entropy);
  const Tensor g = as_contiguous(grad), e = as_contiguous(entropy), s = as_contiguous(salience),
               a = as_contiguous(alignment), w = as_contiguous(weights);
  Tensor grad_e = allocate_if(need_entropy, e, e.sizes()), grad_s = allocate_if(need_salience, e, e.sizes()),
         grad_a = allocate_if(need_alignment, e, e.sizes()), grad_w = allocate_if(need_weights, w, w.sizes());
  if (e.numel() == 0) return {grad_e, grad_s, grad_a, torch::stable::zero_(grad_w)};
  dispatch_floating(e.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, OpponentBalanceGrad<T>{data_of<T>(g), data_of<T>(e), data_of<T>(s), data_of<T>(a), data_of<T>(w),
                                       data_of<T>(grad_e), data_of<T>(grad_s), data_of<T>(grad_a), data_of<T>(grad_w),
                                       e.size(0), e.size(1), w.dim() == 2 ? 3 : 0, invert_entropy});
  });
  return {grad_e, grad_s, grad_a, grad_w};
}

}  // namespace arr_coc
