#pragma once

#include <cmath>

#include "common.h"

namespace paged_cache {

constexpr int64_t kMaxWidth = 256;  // what a warp of the CUDA kernel holds

// Python, torch.compile and compiled packages all reach the kernels directly.
inline void check_paged_attention(const Tensor& q, const Tensor& kc, const Tensor& vc, const Tensor& block_tables,
                                  const Tensor& context_lens) {
  const char* op = "paged_attention";
  Checks checks(op);
  checks.tensor("q", q, {"B", "Q", {"D", 1}});
  checks.tensor("kc", kc, {{"blocks", 1}, {"size", 1}, {"H", 1}, "D"});
  checks.tensor("vc", vc, {"blocks", "size", "H", "D"});
  checks.indices("block_tables", block_tables, {"B", "M"});
  checks.indices("context_lens", context_lens, {"B"});
  check(q.size(1) % kc.size(2) == 0, op, ": q has ", q.size(1), " heads, which is not a multiple of the ", kc.size(2),
        " of kc");
  check(q.size(2) <= kMaxWidth, op, ": D must be at most ", kMaxWidth, ", got ", q.size(2));
}

// A cache [blocks, size, H, D] whose rows have no gaps. Strides are in elements.
template <class T>
struct Cache {
  const T* data;
  int64_t block, place, head;

  C10_HOST_DEVICE const T* row(int64_t block_index, int64_t place_index, int64_t head_index) const {
    return data + block_index * block + place_index * place + head_index * head;
  }
};

template <class T>
struct PagedAttention {
  const T* q;  // [B, Q, D]
  Cache<T> keys, values;
  const int64_t *tables, *lengths;  // [B, M], [B]
  T* out;                           // [B, Q, D]
  int64_t batch, heads, width, blocks, size, kv_heads, table;
  accumulate_t<T> scale;

  C10_HOST_DEVICE int64_t group() const { return heads / kv_heads; }

  // Whether a row of block_tables has room for a context of this length.
  C10_HOST_DEVICE bool has_room(int64_t length) const { return length >= 0 && length <= table * size; }

  // An element of the answer, from its weighted sum and the sum of weights. NaN for a length that cannot be, which only
  // CUDA computes.
  C10_HOST_DEVICE T result(int64_t length, accumulate_t<T> sum, accumulate_t<T> total) const {
    if (!has_room(length)) return T(accumulate_t<T>(NAN));
    return length == 0 ? T(0.f) : T(sum / total);
  }
};

inline Tensor with_whole_rows(const Tensor& cache) {
  return cache.stride(3) == 1 ? cache : torch::stable::contiguous(cache);
}

template <class Device>
Tensor paged_attention(const Tensor& q, const Tensor& kc, const Tensor& vc, const Tensor& block_tables,
                       const Tensor& context_lens, double scale) {
  check_paged_attention(q, kc, vc, block_tables, context_lens);
  const Device device(q);
  const Tensor queries = torch::stable::contiguous(q), keys = with_whole_rows(kc), values = with_whole_rows(vc),
               tables = torch::stable::contiguous(block_tables), lengths = torch::stable::contiguous(context_lens);
  Tensor out = torch::stable::new_empty(queries, queries.sizes());
  if (out.numel() == 0) return out;
  dispatch(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto cache = [](const Tensor& of) {
      return Cache<T>{of.const_data_ptr<T>(), of.stride(0), of.stride(1), of.stride(2)};
    };
    run(device,
        PagedAttention<T>{queries.const_data_ptr<T>(), cache(keys), cache(values), tables.const_data_ptr<int64_t>(),
                          lengths.const_data_ptr<int64_t>(), out.mutable_data_ptr<T>(), q.size(0), q.size(1), q.size(2),
                          kc.size(0), kc.size(1), kc.size(2), block_tables.size(1), accumulate_t<T>(scale)},
        queries);
  });
  return out;
}

}  // namespace paged_cache
