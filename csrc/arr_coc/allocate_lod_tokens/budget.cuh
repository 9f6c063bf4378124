// The tokens of one patch where samples have no total; select_patches has them, too.
#pragma once

#include "arr_coc/allocate_lod_tokens/allocate_lod_tokens.h"

namespace arr_coc {

__device__ __forceinline__ int64_t lod_budget(double score, int64_t min_tokens, int64_t spread, double gamma) {
  // The intrinsics are never fused. A fused operation would round once, but the reference rounds twice.
  const double scaled = __dmul_rn(double(spread), lod_power(lod_score(score), gamma));
  return min_tokens + int64_t(floor(__dadd_rn(scaled, 0.5)));
}

}  // namespace arr_coc
