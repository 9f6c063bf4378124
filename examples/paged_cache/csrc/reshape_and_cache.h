#pragma once

#include "common.h"

namespace paged_cache {

// Whether every stride steps past the extent of the smaller ones. No two elements of such a tensor share memory.
inline bool has_distinct_elements(const Tensor& tensor) {
  std::array<int64_t, 4> dims;  // those of more than one element, from the smallest stride to the largest
  int count = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 1) continue;
    int place = count++;
    for (; place > 0 && tensor.stride(dims[place - 1]) > tensor.stride(dim); --place) dims[place] = dims[place - 1];
    dims[place] = dim;
  }
  int64_t reach = 0;
  for (int i = 0; i < count; ++i) {
    if (tensor.stride(dims[i]) <= reach) return false;
    reach += (tensor.size(dims[i]) - 1) * tensor.stride(dims[i]);
  }
  return true;
}

inline void check_written(const char* name, const Tensor& cache) {
  check(cache.numel() == 0 || has_distinct_elements(cache), "reshape_and_cache: elements of ", name,
        " must not share memory, got shape ", Numbers{cache}, " with strides ", Numbers{cache, true});
}

// Python, torch.compile and compiled packages all reach the kernels directly.
inline void check_reshape_and_cache(const Tensor& k, const Tensor& v, const Tensor& kc, const Tensor& vc,
                                    const Tensor& slots) {
  Checks checks("reshape_and_cache");
  checks.tensor("k", k, {"T", {"H", 1}, {"D", 1}});
  checks.tensor("v", v, {"T", "H", "D"});
  checks.tensor("kc", kc, {{"blocks", 1}, {"size", 1}, "H", "D"});
  checks.tensor("vc", vc, {"blocks", "size", "H", "D"});
  checks.indices("slots", slots, {"T"});
  check_written("kc", kc);
  check_written("vc", vc);
}

// A cache, and the rows that go into it.
struct Written {
  const char* from;  // [T, H, D], contiguous
  char* to;
  int64_t block, place, head, element;  // strides of the cache, in elements
};

struct ReshapeAndCache {
  Written caches[2];
  const int64_t* slots;
  int64_t tokens, blocks, size, heads, width, element_size;
};

template <class Device>
void reshape_and_cache(const Tensor& k, const Tensor& v, Tensor kc, Tensor vc, const Tensor& slots) {
  check_reshape_and_cache(k, v, kc, vc, slots);
  if (k.numel() == 0) return;
  const Device device(k);
  const Tensor keys = torch::stable::contiguous(k), values = torch::stable::contiguous(v),
               places = torch::stable::contiguous(slots);
  const auto written = [](const Tensor& rows, const Tensor& cache) {
    return Written{static_cast<const char*>(rows.const_data_ptr()),
                   static_cast<char*>(cache.mutable_data_ptr()),
                   cache.stride(0),
                   cache.stride(1),
                   cache.stride(2),
                   cache.stride(3)};
  };
  run(device, ReshapeAndCache{{written(keys, kc), written(values, vc)},
                              places.const_data_ptr<int64_t>(),
                              k.size(0),
                              kc.size(0),
                              kc.size(1),
                              k.size(1),
                              k.size(2),
                              int64_t(k.element_size())});
}

}  // namespace paged_cache
