// What the cosines on the CPU and on CUDA share.
#pragma once

#include <cstdint>

#include "arr_coc/common/dispatch.h"

namespace arr_coc {

// Norms are clamped to at least this before a division, like in torch.nn.functional.normalize.
constexpr double kNormFloor = 1e-12;

// The rows in a chunk of a column sum, times the number of groups. So partial sums take less than 1 / kColumnChunk of
// the input's memory.
constexpr int64_t kColumnChunk = 128;

// 1 / max(norm, floor), where NaN stays.
template <class A>
ARR_COC_FUNCTION A inverse_norm(A norm) {
  return 1 / (norm < A(kNormFloor) ? A(kNormFloor) : norm);
}

// Whether the norm's own gradient passes its clamp, as a factor.
template <class A>
ARR_COC_FUNCTION A norm_passes(A norm) {
  return norm >= A(kNormFloor) ? A(1) : A(0);
}

// The token that a row fits best: the first with the maximum, where NaN is larger than any number, as in torch.max; -1
// if every token is masked.
template <class A>
struct Match {
  int64_t token = -1;
  A cosine = 0;

  ARR_COC_FUNCTION void offer(int64_t candidate, A value) {
    if (token < 0 || value > cosine || (value != value && cosine == cosine)) token = candidate, cosine = value;
  }
};

}  // namespace arr_coc
