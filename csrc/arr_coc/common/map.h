// Elementwise operators on the CPU. common/map.cuh is the same for CUDA, with the same functions.
#pragma once

#include <vector>

#include "arr_coc/common/convert.h"
#include "arr_coc/common/cpu.h"

namespace arr_coc {

// Whether a function uses one input's element or not depending on another's. Then GCC loads it only after the other
// (AVX-512's masked loads), and the waits for memory add up unless both are prefetched.
template <class F>
constexpr bool kSelects = false;

template <class F, class T, class... In>
ARR_COC_EVERY_ISA void map_loop(F f, T* out, int64_t size, const In*... in) {
  int64_t begin = 0;
  if constexpr (kSelects<F>) {
    for (; begin + kPrefetchBlock <= size; begin += kPrefetchBlock) {
      (prefetch_behind(in + begin), ...);
#pragma omp simd
      for (int64_t i = begin; i < begin + kPrefetchBlock; ++i) out[i] = store<T>(f(load(in[i])...));
    }
  }
#pragma omp simd
  for (int64_t i = begin; i < size; ++i) out[i] = store<T>(f(load(in[i])...));
}

#ifdef ARR_COC_HALF_VECTORS
// Eight numbers, in a register if possible.
struct alignas(32) Eight {
  float values[8];
};

ARR_COC_HALF_VECTORS inline Eight load_eight(const Half* in) {
  Eight eight;
  widen_eight(in, eight.values);
  return eight;
}

ARR_COC_HALF_VECTORS inline Eight load_eight(const float* in) {
  Eight eight;
  copy_eight(in, eight.values);
  return eight;
}

// Computes the elements that fill vectors; returns their number.
template <class F, class... In>
ARR_COC_HALF_VECTORS int64_t map_vectors(F f, Half* out, int64_t size, const In*... in) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    const auto computed = [&](const auto&... inputs) __attribute__((always_inline)) {
      Eight result;
#pragma omp simd
      for (int j = 0; j < 8; ++j) result.values[j] = f(inputs.values[j]...);
      return result;
    };
    const Eight result = computed(load_eight(in + i)...);
    narrow_eight(result.values, out + i);
  }
  return i;
}
#endif

// out[i] = f(in[i]...) on this thread, computed in T's accumulate type. The inputs may have that type.
template <class F, class T, class... In>
void map_here(const F& f, T* out, int64_t size, const In*... in) {
  int64_t done = 0;
#ifdef ARR_COC_HALF_VECTORS
  if constexpr (std::is_same_v<T, Half>) done = has_half_vectors() ? map_vectors(f, out, size, in...) : 0;
#endif
  map_loop(f, out + done, size - done, (in + done)...);
}

// The same on all threads.
template <class F, class T, class... In>
void map(const Cpu&, const F& f, T* out, int64_t size, const In*... in) {
  parallel_rows(size, 1, [&](int64_t begin, int64_t end) { map_here(f, out + begin, end - begin, (in + begin)...); });
}

constexpr int64_t kShortRow = 512;

// A row, repeated if it is short, so that loops over several rows at once are long enough to vectorise.
template <class A>
struct RepeatedRow {
  std::vector<A> values;

  // A row of zeros.
  explicit RepeatedRow(int64_t width) : values(width * std::max<int64_t>(1, kShortRow / std::max<int64_t>(1, width))) {}

  template <class T>
  RepeatedRow(const T* row, int64_t width) : RepeatedRow(width) {
    for (int64_t d = 0; d < width; ++d) values[d] = load(row[d]);
    for (int64_t d = width; d < size(); ++d) values[d] = values[d - width];
  }

  int64_t size() const { return int64_t(values.size()); }
};

// out[i] = f(x[i], row[i % width]) on all threads.
template <class F, class T>
void map_rows(const Cpu&, const F& f, T* out, int64_t size, const T* x, const T* row, int64_t width) {
  const RepeatedRow<accumulate_t<T>> repeated(row, width);
  parallel_rows(size, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin, next; at < end; at = next) {
      const int64_t column = at % repeated.size();
      next = std::min(end, at - column + repeated.size());
      map_here(f, out + at, next - at, x + at, repeated.values.data() + column);
    }
  });
}

}  // namespace arr_coc
