#include "reshape_and_cache.h"

namespace paged_cache {
namespace {

void copy_row(const char* from, char* to, int64_t width, int64_t step, int64_t bytes) {
  if (step == 1) {
    std::memcpy(to, from, width * bytes);
    return;
  }
  for (int64_t d = 0; d < width; ++d) std::memcpy(to + d * step * bytes, from + d * bytes, bytes);
}

}  // namespace

void run(const Cpu&, const ReshapeAndCache& call) {
  const int64_t all = call.blocks * call.size, bytes = call.element_size, token = call.heads * call.width;
  // Before anything is written.
  for (int64_t t = 0; t < call.tokens; ++t)
    check(call.slots[t] < all, "reshape_and_cache: slots[", t, "] is ", call.slots[t], ", but the caches have ", all,
          " slots; a negative one leaves its token out");
  torch::stable::parallel_for(0, call.tokens, 1 + 32768 / token, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = call.slots[t];
      if (slot < 0) continue;
      for (const Written& cache : call.caches) {
        char* to = cache.to + (slot / call.size * cache.block + slot % call.size * cache.place) * bytes;
        const char* from = cache.from + t * token * bytes;
        if (cache.element == 1 && cache.head == call.width) {
          std::memcpy(to, from, token * bytes);
          continue;
        }
        for (int64_t h = 0; h < call.heads; ++h)
          copy_row(from + h * call.width * bytes, to + h * cache.head * bytes, call.width, cache.element, bytes);
      }
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(paged_cache, m) {
  m.def("reshape_and_cache(Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, Tensor slots) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(paged_cache, CPU, m) { m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache<Cpu>)); }

}  // namespace paged_cache
