#pragma once

#include "common/allocate.h"
#include "common/checks.h"
#include "common/contiguous.h"

namespace arr_coc {

// The size of a chunk of a sample's scores on both devices. So the order in which a weight's gradient is summed depends
// on N alone, not on B or the number of threads.
constexpr int64_t kBalanceChunk = 2048;

inline void check_opponent_balance(const Tensor& entropy, const Tensor& salience, const Tensor& alignment,
                                   const Tensor& weights) {
  const char* op = "opponent_balance";
  check_rank(op, "entropy", entropy, 2, "[B, N]");
  check_floating(op, "entropy", entropy);
  check_rank(op, "salience", salience, 2, "[B, N]");
  check_alike(op, "entropy", entropy, "salience", salience);
  check_same_size(op, "B", "salience", salience.size(0), "entropy", entropy.size(0));
  check_same_size(op, "N", "salience", salience.size(1), "entropy", entropy.size(1));
  check_rank(op, "alignment", alignment, 2, "[B, N]");
  check_alike(op, "entropy", entropy, "alignment", alignment);
  check_same_size(op, "B", "alignment", alignment.size(0), "entropy", entropy.size(0));
  check_same_size(op, "N", "alignment", alignment.size(1), "entropy", entropy.size(1));
  check((weights.dim() == 1 || weights.dim() == 2) && weights.size(-1) == 3, op,
        ": weights must be [3] or [B, 3], got shape ", shape_of(weights));
  check_alike(op, "entropy", entropy, "weights", weights);
  if (weights.dim() == 2) check_same_size(op, "B", "weights", weights.size(0), "entropy", entropy.size(0));
}

inline void check_opponent_balance_grad(const Tensor& grad, const Tensor& entropy, const Tensor& salience,
                                        const Tensor& alignment, const Tensor& weights) {
  const char* op = "opponent_balance_grad";
  check_opponent_balance(entropy, salience, alignment, weights);
  check_rank(op, "grad", grad, 2, "[B, N]");
  check_alike(op, "entropy", entropy, "grad", grad);
  check_same_size(op, "B", "grad", grad.size(0), "entropy", entropy.size(0));
  check_same_size(op, "N", "grad", grad.size(1), "entropy", entropy.size(1));
}

}  // namespace arr_coc
