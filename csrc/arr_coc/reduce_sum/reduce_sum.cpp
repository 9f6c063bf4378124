#include "arr_coc/reduce_sum/reduce_sum.h"

#include <torch/csrc/stable/library.h>

#include <type_traits>
#include <vector>

#include "arr_coc/common/convert.h"
#include "arr_coc/common/lanes.h"

namespace arr_coc {
namespace {

// The tree of additions does not depend on strides or on other elements of the tensor. Of 64 consecutive elements,
// those 16 apart are added in pairs. These 16 sums are added over a segment, then in pairs 8, 4, 2 and 1 apart. The
// sums of segments are added in pairs 1, 2, 4... apart.
constexpr int64_t kRound = 4 * kLanes;
constexpr int64_t kSegment = 64 * kRound;

// The most columns that a thread sums at once, so that the 16 sums for each fit the first cache; and the fewest,
// several cache lines of a row.
constexpr int64_t kColumns = 256, kLeastColumns = 64;

// How many columns a thread sums at once, so that all threads have equal work.
int64_t columns_at_once(int64_t inner, int64_t others) {
  const int64_t threads = torch::stable::get_num_threads();
  int64_t slabs = (inner + kColumns - 1) / kColumns;
  while (slabs * others < 4 * threads && slabs * others % threads != 0 && inner >= (slabs + 1) * kLeastColumns) ++slabs;
  const int64_t columns = (inner + slabs - 1) / slabs;
  return (columns + kLanes - 1) / kLanes * kLanes;
}

template <class A>
ARR_COC_INLINE A inner_sum(const A* x, int64_t size) {
  A lanes[kLanes] = {};
  int64_t begin = 0;
  for (; begin + kRound <= size; begin += kRound) {
    const A* row = x + begin;
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j)
      lanes[j] += (row[j] + row[j + kLanes]) + (row[j + 2 * kLanes] + row[j + 3 * kLanes]);
  }
  if (begin < size) {
    A rest[kRound] = {};
    std::copy_n(x + begin, size - begin, rest);
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j)
      lanes[j] += (rest[j] + rest[j + kLanes]) + (rest[j + 2 * kLanes] + rest[j + 3 * kLanes]);
  }
  return sum_of_lanes(lanes);
}

// The sums of segments that lie along memory.
template <class A>
ARR_COC_EVERY_ISA void inner_sums(const A* x, int64_t stride, int64_t size, int64_t count, A* sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] = inner_sum(x + i * stride, size);
}

template <class A>
ARR_COC_EVERY_ISA void add_rows(const A* const (&rows)[4], int64_t columns, A* sums) {
  const A *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) sums[i] += (a[i] + b[i]) + (c[i] + d[i]);
}

template <class A>
ARR_COC_EVERY_ISA void add_up(const A* from, int64_t columns, A* sums) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) sums[i] += from[i];
}

// The sums of lanes in pairs 8, 4, 2 and 1 apart, of which all from the `count`-th on are 0.
template <int kCount, class A>
ARR_COC_INLINE void add_lanes_of(const A* const* lanes, int64_t columns, A* sums) {
  const auto tree = [&](auto&& self, auto first, auto apart, int64_t i) __attribute__((always_inline)) -> A {
    constexpr int kFirst = decltype(first)::value, kApart = decltype(apart)::value;
    if constexpr (kApart == kCount) {
      return lanes[kFirst][i] + A(0);
    } else {
      const std::integral_constant<int, 2 * kApart> next;
      return self(self, first, next, i) + self(self, std::integral_constant<int, kFirst + kApart>{}, next, i);
    }
  };
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i)
    sums[i] = tree(tree, std::integral_constant<int, 0>{}, std::integral_constant<int, 1>{}, i);
}

template <class A>
ARR_COC_EVERY_ISA void add_lanes(const A* const* lanes, int64_t count, int64_t columns, A* sums) {
  if (count <= 4)
    add_lanes_of<4>(lanes, columns, sums);
  else if (count <= 8)
    add_lanes_of<8>(lanes, columns, sums);
  else
    add_lanes_of<16>(lanes, columns, sums);
}

// The sums of a segment that lies across memory, for columns side by side.
template <class T, class A>
void outer_sum(const T* x, int64_t stride, int64_t size, int64_t columns, A* sums) {
  static const A zeros[kColumns] = {};
  A buffers[kLanes][kColumns];
  const A* lanes[kLanes];
  std::fill_n(lanes, kLanes, zeros);
  if (size <= kLanes) {
    for (int64_t r = 0; r < size; ++r) lanes[r] = accumulated(x + r * stride, columns, buffers[r]);
  } else {
    A wide[4][kColumns];
    for (int64_t j = 0; j < kLanes; ++j) {
      std::fill_n(buffers[j], columns, A(0));
      lanes[j] = buffers[j];
    }
    for (int64_t begin = 0; begin < size; begin += kRound) {
      for (int64_t j = 0; j < kLanes && begin + j < size; ++j) {
        const A* rows[4];
        for (int64_t k = 0; k < 4; ++k) {
          const int64_t r = begin + j + k * kLanes;
          rows[k] = r < size ? accumulated(x + r * stride, columns, wide[k]) : zeros;
        }
        add_rows(rows, columns, buffers[j]);
      }
    }
  }
  add_lanes(lanes, size, columns, sums);
}

// The sums of segment number `segment`, for outputs [begin, begin + count) of the same outer index.
template <class T, class A>
void sum_segment(const T* x, const SumLayout& layout, int64_t begin, int64_t count, int64_t segment, A* sums) {
  const int64_t first = segment * kSegment, size = std::min(kSegment, layout.size - first);
  x += layout.offset(begin) + first * layout.stride;
  if (layout.inner_stride == 1 && layout.stride != 1) {
    outer_sum(x, layout.stride, size, count, sums);
  } else if (std::is_same_v<T, A> && layout.stride == 1) {
    inner_sums(reinterpret_cast<const A*>(x), layout.inner_stride, size, count, sums);
  } else {
    T gathered[kSegment];
    A wide[kSegment];
    for (int64_t i = 0; i < count; ++i, x += layout.inner_stride) {
      if (layout.stride != 1)
        for (int64_t r = 0; r < size; ++r) gathered[r] = x[r * layout.stride];
      inner_sums(accumulated(layout.stride == 1 ? x : gathered, size, wide), 0, size, 1, sums + i);
    }
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const ReduceSum<T>& call) {
  using A = accumulate_t<T>;
  const SumLayout& layout = call.layout;
  const int64_t segments = (layout.size + kSegment - 1) / kSegment;
  const int64_t columns = columns_at_once(layout.inner, layout.outer * segments);
  const int64_t slabs = (layout.inner + columns - 1) / columns, blocks = layout.outer * slabs;
  std::vector<A> partial(segments > 1 ? segments * layout.outputs() : 0);
  const int64_t cost = std::min(layout.size, kSegment) * std::min(columns, layout.inner);
  parallel_rows(blocks * segments, cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t segment = item / blocks, block = item % blocks, column = block % slabs * columns;
      const int64_t count = std::min(columns, layout.inner - column);
      const int64_t output = block / slabs * layout.inner + column;
      A sums[kColumns];
      sum_segment(call.x, layout, output, count, segment, sums);
      if (segments == 1) {
        for (int64_t i = 0; i < count; ++i) call.out[output + i] = store<T>(sums[i]);
      } else {
        std::copy_n(sums, count, partial.data() + segment * layout.outputs() + output);
      }
    }
  });
  if (segments == 1) return;
  for (int64_t apart = 1; apart < segments; apart *= 2) {
    for (int64_t segment = 0; segment + apart < segments; segment += 2 * apart) {
      A* sums = partial.data() + segment * layout.outputs();
      add_up(sums + apart * layout.outputs(), layout.outputs(), sums);
    }
  }
  for (int64_t i = 0; i < layout.outputs(); ++i) call.out[i] = store<T>(partial[i]);
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) { m.def("reduce_sum(Tensor x, SymInt dim) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("reduce_sum", TORCH_BOX(&reduce_sum<Cpu>)); }

}  // namespace arr_coc
