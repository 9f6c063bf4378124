#include "paged_attention.h"

#include <vector>

// Marks a loop to be compiled once per x86-64 level. The processor's best version is picked when the library loads.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_ISA
#endif

namespace paged_cache {
namespace {

template <class T, class A>
EVERY_ISA void widen(const T* from, A* to, A factor, int64_t width) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) to[d] = A(from[d]) * factor;
}

// products[g] = q[g] key, where q is [group, width].
template <class A>
EVERY_ISA void dot(const A* q, const A* key, A* products, int64_t group, int64_t step, int64_t width) {
  for (int64_t g = 0; g < group; ++g) {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; ++d) sum += q[g * width + d] * key[d];
    products[g * step] = sum;
  }
}

// sums[g] += weights[g] value, where sums is [group, width].
template <class A>
EVERY_ISA void add(const A* weights, const A* value, A* sums, int64_t group, int64_t step, int64_t width) {
  for (int64_t g = 0; g < group; ++g) {
    const A weight = weights[g * step];
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) sums[g * width + d] += weight * value[d];
  }
}

// Replaces scores by exp(score - highest) and returns their sum; NaN stays.
template <class A>
A exponentials(A* scores, int64_t length) {
  A highest = -INFINITY, sum = 0;
  for (int64_t t = 0; t < length; ++t) highest = scores[t] > highest ? scores[t] : highest;
  for (int64_t t = 0; t < length; ++t) sum += scores[t] = std::exp(scores[t] - highest);
  return sum;
}

template <class T>
struct Loop {
  using A = accumulate_t<T>;

  explicit Loop(const PagedAttention<T>& attention)
      : call(attention),
        query(call.group() * call.width),
        sums(call.group() * call.width),
        row(call.width),
        scores(call.group() * call.table * call.size) {}

  // The queries of a group, which share the keys and values of one head, each read once.
  void run(int64_t sample, int64_t head) {
    const int64_t group = call.group(), width = call.width, length = call.lengths[sample];
    const int64_t first = (sample * call.heads + head * group) * width;
    T* out = call.out + first;
    if (length == 0) {
      std::fill_n(out, group * width, T(0.f));
      return;
    }
    widen(call.q + first, query.data(), call.scale, group * width);
    each_row(call.keys, sample, head,
             [&](int64_t t) { dot(query.data(), row.data(), scores.data() + t, group, length, width); });
    std::fill(sums.begin(), sums.end(), A(0));
    std::vector<A> totals(group);
    for (int64_t g = 0; g < group; ++g) totals[g] = exponentials(scores.data() + g * length, length);
    each_row(call.values, sample, head,
             [&](int64_t t) { add(scores.data() + t, row.data(), sums.data(), group, length, width); });
    for (int64_t i = 0; i < group * width; ++i) out[i] = T(sums[i] / totals[i / width]);
  }

  template <class F>
  void each_row(const Cache<T>& cache, int64_t sample, int64_t head, const F& f) {
    const int64_t* table = call.tables + sample * call.table;
    for (int64_t t = 0; t < call.lengths[sample]; ++t) {
      widen(cache.row(table[t / call.size], t % call.size, head), row.data(), A(1), call.width);
      f(t);
    }
  }

  const PagedAttention<T>& call;
  std::vector<A> query, sums, row, scores;
};

template <class T>
void check_values(const PagedAttention<T>& call) {
  const char* op = "paged_attention";
  for (int64_t sample = 0; sample < call.batch; ++sample) {
    const int64_t length = call.lengths[sample], room = call.table * call.size;
    check(length >= 0, op, ": context_lens[", sample, "] is ", length, "; it must be >= 0");
    check(length <= room, op, ": context_lens[", sample, "] is ", length, ", but its row of block_tables has room for ",
          room);
    for (int64_t i = 0; i * call.size < length; ++i) {
      const int64_t block = call.tables[sample * call.table + i];
      check(block >= 0 && block < call.blocks, op, ": block_tables[", sample, ", ", i, "] is ", block,
            ", but the caches have ", call.blocks, " blocks");
    }
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const PagedAttention<T>& call, const Tensor&) {
  check_values(call);
  torch::stable::parallel_for(0, call.batch * call.kv_heads, 1, [&](int64_t begin, int64_t end) {
    Loop<T> loop(call);
    for (int64_t i = begin; i < end; ++i) loop.run(i / call.kv_heads, i % call.kv_heads);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(paged_cache, m) {
  m.def(
      "paged_attention(Tensor q, Tensor kc, Tensor vc, Tensor block_tables, Tensor context_lens, float scale) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(paged_cache, CPU, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention<Cpu>)); }

}  // namespace paged_cache
