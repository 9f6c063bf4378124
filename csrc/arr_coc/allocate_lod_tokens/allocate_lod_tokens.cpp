#include "arr_coc/allocate_lod_tokens/allocate_lod_tokens.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "arr_coc/common/cpu.h"

namespace arr_coc {
namespace {

// A product that is rounded before an addition. If a compiler fused the two, the result could differ by a token from
// the reference, which rounds twice.
double rounded_product(double a, double b) {
  volatile double product = a * b;
  return product;
}

// Elements become full from the highest weight down. Each round fills every element that the current level reaches. The
// level only rises, so the last round is exact. This is Newton's method on a concave piecewise linear function, which
// ends after a few rounds.
WaterLevel water_level(const int64_t* weights, int64_t count, int64_t extra, int64_t spread) {
  WaterLevel level{extra, 0, 0};
  for (int64_t i = 0; i < count; ++i) level.unfilled += weights[i];
  for (;;) {
    WaterLevel next{0, 0, 0};
    for (int64_t i = 0; i < count; ++i) {
      const bool full = level.fills(weights[i], spread);
      next.full += full;
      next.unfilled += full ? 0 : weights[i];
    }
    next.rest = extra - next.full * spread;
    if (next.full == level.full) return level;
    level = next;
  }
}

struct Leftover {
  int64_t remainder, index;
  bool operator<(const Leftover& other) const {
    return remainder != other.remainder ? remainder > other.remainder : index < other.index;
  }
};

// On entry `tokens` holds the weights.
void allot_total(int64_t* tokens, int64_t count, int64_t min_tokens, int64_t spread, int64_t extra,
                 std::vector<Leftover>& leftovers) {
  const WaterLevel level = water_level(tokens, count, extra, spread);
  Shares shares{level.rest, level.unfilled, level.unfilled == 0};
  if (shares.equal) shares.sum = std::max<int64_t>(1, count - level.full);
  leftovers.clear();
  int64_t missing = level.rest;
  for (int64_t i = 0; i < count; ++i) {
    if (level.fills(tokens[i], spread)) {
      tokens[i] = min_tokens + spread;
      continue;
    }
    const int64_t product = shares.product(tokens[i]), share = product / shares.sum;
    leftovers.push_back({product - share * shares.sum, i});
    tokens[i] = min_tokens + share;
    missing -= share;
  }
  if (missing == 0) return;
  std::nth_element(leftovers.begin(), leftovers.begin() + missing, leftovers.end());
  for (int64_t j = 0; j < missing; ++j) ++tokens[leftovers[j].index];
}

}  // namespace

template <class T>
void run(const Cpu&, const AllocateLodTokens<T>& call) {
  const int64_t count = call.count, min_tokens = call.min_tokens, spread = call.spread;
  if (!call.extra) {
    return parallel_rows(call.batch * count, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const double share = lod_power(lod_score(call.scores[i]), call.gamma);
        call.tokens[i] = min_tokens + int64_t(std::floor(rounded_product(spread, share) + 0.5));
      }
    });
  }
  parallel_rows(call.batch, count * 64, [&](int64_t begin, int64_t end) {
    std::vector<double> clamped(count);
    std::vector<Leftover> leftovers;
    for (int64_t b = begin; b < end; ++b) {
      double highest = 0;
      for (int64_t i = 0; i < count; ++i) {
        clamped[i] = lod_score(call.scores[b * count + i]);
        highest = std::max(highest, clamped[i]);
      }
      int64_t* row = call.tokens + b * count;
      for (int64_t i = 0; i < count; ++i) row[i] = lod_weight(clamped[i], highest, call.gamma);
      allot_total(row, count, min_tokens, spread, *call.extra, leftovers);
    }
  });
}

template void run(const Cpu&, const AllocateLodTokens<float>&);
template void run(const Cpu&, const AllocateLodTokens<double>&);
template void run(const Cpu&, const AllocateLodTokens<Half>&);
template void run(const Cpu&, const AllocateLodTokens<BFloat16>&);

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "allocate_lod_tokens(Tensor scores, SymInt min_tokens=64, SymInt max_tokens=400, float gamma=1.0, "
      "SymInt? total=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("allocate_lod_tokens", TORCH_BOX(&allocate_lod_tokens<Cpu>)); }

}  // namespace arr_coc
