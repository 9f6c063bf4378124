#pragma once

#include <torch/headeronly/macros/Macros.h>

#include <cmath>
#include <cstdint>
#include <optional>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

struct Cpu;
class Cuda;

// The most tokens of one patch and, with a total, of one sample. Then every product of the exact allocation fits int64:
// tokens < 2^31 times weights <= 2^32.
constexpr int64_t kMaxTokens = 2147483647;
constexpr double kWeightOne = 4294967296.0;  // 2^32: the weight of the highest score

// Checks the numbers for `count` patches a sample.
inline void check_budgets(const char* op, int64_t count, int64_t min_tokens, int64_t max_tokens, double gamma,
                          std::optional<int64_t> total) {
  check(0 <= min_tokens && min_tokens <= max_tokens, op,
        ": 0 <= min_tokens <= max_tokens must hold, got min_tokens = ", min_tokens, ", max_tokens = ", max_tokens);
  check(max_tokens <= kMaxTokens, op, ": max_tokens must be at most ", kMaxTokens, ", got ", max_tokens);
  check(gamma > 0 && std::isfinite(gamma), op, ": gamma must be > 0 and finite, got ", gamma);
  if (!total) return;
  check(max_tokens == 0 || count <= kMaxTokens / max_tokens, op, ": with a total, K * max_tokens must be at most ",
        kMaxTokens, ", got K = ", count, ", max_tokens = ", max_tokens);
  check(count * min_tokens <= *total && *total <= count * max_tokens, op,
        ": total must be in [K * min_tokens, K * max_tokens] = [", count * min_tokens, ", ", count * max_tokens,
        "], got ", *total);
}

// clamp(score, 0, 1) in float64, NaN as 0.
C10_HOST_DEVICE inline double lod_score(double score) { return score > 0 ? (score < 1 ? score : 1.0) : 0.0; }

// score^gamma of a clamped score. Implementations of pow differ in the last bits. Rounding to 48 fractional bits makes
// them agree if the exact power is such a number, and only then can a token depend on the last bits.
C10_HOST_DEVICE inline double lod_power(double score, double gamma) {
  if (gamma == 1) return score;
  constexpr double steps = 281474976710656.0;  // 2^48
  return floor((gamma == 2 ? score * score : pow(score, gamma)) * steps + 0.5) / steps;
}

#ifdef __CUDACC__
// The tokens of one patch of a sample without a total. select_patches calls it, too.
__device__ __forceinline__ int64_t lod_budget(double score, int64_t min_tokens, int64_t spread, double gamma) {
  // The intrinsics are never fused. A fused operation would round once, but the reference rounds twice.
  const double scaled = __dmul_rn(double(spread), lod_power(lod_score(score), gamma));
  return min_tokens + int64_t(floor(__dadd_rn(scaled, 0.5)));
}
#endif

// (score / highest)^gamma in steps of 2^-32. Weights are integers, so sums and comparisons are exact in any order. They
// are relative, so small scores are distinguished as well as large ones. If the highest score is 0, all weights are 0.
C10_HOST_DEVICE inline int64_t lod_weight(double score, double highest, double gamma) {
  if (highest == 0) return 0;
  const double ratio = score / highest;
  return int64_t(floor((gamma == 1 ? ratio : pow(ratio, gamma)) * kWeightOne + 0.5));
}

// The water level of one sample: elements with weight * level >= spread are full. level = rest / unfilled, where rest
// is the part of the extra tokens that full elements leave, and unfilled the sum of the other weights.
struct WaterLevel {
  int64_t rest, unfilled, full;
  C10_HOST_DEVICE bool fills(int64_t weight, int64_t spread) const {
    return weight > 0 && rest * weight >= spread * unfilled;
  }
};

// The shares of `rest` for elements that are not full: by weight, or equal if all their weights are zero.
struct Shares {
  int64_t rest, sum;
  bool equal;
  C10_HOST_DEVICE int64_t product(int64_t weight) const { return rest * (equal ? int64_t(weight == 0) : weight); }
};

// `spread` is max_tokens - min_tokens; `extra` is what a total leaves beyond min_tokens each.
template <class T>
struct AllocateLodTokens {
  const T* scores;
  int64_t* tokens;
  int64_t batch, count, min_tokens, spread;
  double gamma;
  std::optional<int64_t> extra;
};

// Numbers as the adapters get them.
template <class T>
AllocateLodTokens<T> lod_allocation(const T* scores, int64_t* tokens, int64_t batch, int64_t count, int64_t min_tokens,
                                    int64_t max_tokens, double gamma, std::optional<int64_t> total) {
  const auto extra = total ? std::make_optional(*total - count * min_tokens) : std::nullopt;
  return {scores, tokens, batch, count, min_tokens, max_tokens - min_tokens, gamma, extra};
}

// select_patches calls these, too; the sources of allocate_lod_tokens have them for every T.
template <class T>
void run(const Cpu& device, const AllocateLodTokens<T>& call);
template <class T>
void run(const Cuda& device, const AllocateLodTokens<T>& call);

template <class Device>
Tensor allocate_lod_tokens(const Tensor& scores, int64_t min_tokens, int64_t max_tokens, double gamma,
                           std::optional<int64_t> total) {
  const char* op = "allocate_lod_tokens";
  check_rank(op, "scores", scores, 2, "[B, K]");
  check_floating(op, "scores", scores);
  check_budgets(op, scores.size(1), min_tokens, max_tokens, gamma, total);
  const Device device(scores);
  const Tensor x = as_contiguous(scores);
  const int64_t batch = x.size(0), count = x.size(1);
  Tensor tokens = allocate(x, {batch, count}, ScalarType::Long);
  if (batch * count == 0) return tokens;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device,
        lod_allocation(data_of<T>(x), data_of<int64_t>(tokens), batch, count, min_tokens, max_tokens, gamma, total));
  });
  return tokens;
}

}  // namespace arr_coc
