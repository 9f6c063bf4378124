#include "ops/reduce_sum/reduce_sum.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/convert.h"

namespace arr_coc {
namespace {

// The tree, which is the same whatever lies beside the elements in memory, so that no stride and no other element of
// the tensor shows in a result. Of 64 consecutive elements those 16 apart are added in pairs; these 16 sums are added
// up over a segment, and then in pairs 8, 4, 2 and 1 apart; the sums of the segments are added in pairs 1, 2, 4...
// apart.
constexpr int64_t kLanes = 16;
constexpr int64_t kRound = 4 * kLanes;
constexpr int64_t kSegment = 64 * kRound;

// Columns that a thread sums at once: its 16 sums for each of them fit the first cache.
constexpr int64_t kColumns = 128;

template <class A>
ARR_COC_INLINE A sum_of_lanes(A (&lanes)[kLanes]) {
  for (int64_t apart = kLanes / 2; apart > 0; apart /= 2)
    for (int64_t j = 0; j < apart; ++j) lanes[j] += lanes[j + apart];
  return lanes[0];
}

// The sum of a segment that lies along memory.
template <class T, class A>
ARR_COC_EVERY_ISA A inner_sum(const T* x, int64_t size) {
  A lanes[kLanes] = {};
  int64_t begin = 0;
  for (; begin + kRound <= size; begin += kRound) {
    const T* row = x + begin;
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j)
      lanes[j] +=
          (A(load(row[j])) + A(load(row[j + kLanes]))) + (A(load(row[j + 2 * kLanes])) + A(load(row[j + 3 * kLanes])));
  }
  if (begin < size) {
    A rest[kRound] = {};
    for (int64_t j = 0; begin + j < size; ++j) rest[j] = A(load(x[begin + j]));
    for (int64_t j = 0; j < kLanes; ++j)
      lanes[j] += (rest[j] + rest[j + kLanes]) + (rest[j + 2 * kLanes] + rest[j + 3 * kLanes]);
  }
  return sum_of_lanes(lanes);
}

template <class T, class A>
ARR_COC_EVERY_ISA void add_rows(const T* a, const T* b, const T* c, const T* d, int64_t columns, A* sums) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) sums[i] += (A(load(a[i])) + A(load(b[i]))) + (A(load(c[i])) + A(load(d[i])));
}

template <class A>
ARR_COC_EVERY_ISA void add_up(const A* from, int64_t columns, A* sums) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) sums[i] += from[i];
}

// The sums of a segment that lies across memory, for columns side by side.
template <class T, class A>
void outer_sum(const T* x, int64_t stride, int64_t size, int64_t columns, A* sums) {
  static const T zeros[kColumns] = {};
  A lanes[kLanes][kColumns];
  const int64_t used = std::min(size, kLanes);
  for (int64_t j = 0; j < used; ++j) std::fill_n(lanes[j], columns, A(0));
  for (int64_t begin = 0; begin < size; begin += kRound) {
    for (int64_t j = 0; j < kLanes && begin + j < size; ++j) {
      const T* rows[4];
      for (int64_t k = 0; k < 4; ++k) {
        const int64_t r = begin + j + k * kLanes;
        rows[k] = r < size ? x + r * stride : zeros;
      }
      add_rows(rows[0], rows[1], rows[2], rows[3], columns, lanes[j]);
    }
  }
  for (int64_t apart = kLanes / 2; apart > 0; apart /= 2)
    for (int64_t j = 0; j < apart && j + apart < used; ++j) add_up(lanes[j + apart], columns, lanes[j]);
  std::copy_n(lanes[0], columns, sums);
}

// The sums of segment number `segment`, for outputs [begin, begin + count) of the same outer index.
template <class T, class A>
void sum_segment(const T* x, const SumLayout& layout, int64_t begin, int64_t count, int64_t segment, A* sums) {
  const int64_t first = segment * kSegment, size = std::min(kSegment, layout.size - first);
  x += layout.offset(begin) + first * layout.stride;
  if (layout.stride == 1) {
    for (int64_t i = 0; i < count; ++i) sums[i] = inner_sum<T, A>(x + i * layout.inner_stride, size);
  } else if (layout.inner_stride == 1) {
    outer_sum(x, layout.stride, size, count, sums);
  } else {
    T gathered[kSegment];
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t r = 0; r < size; ++r) gathered[r] = x[i * layout.inner_stride + r * layout.stride];
      sums[i] = inner_sum<T, A>(gathered, size);
    }
  }
}

Tensor reduce_sum_cpu(const Tensor& x, int64_t dim) {
  check_reduce_sum(x, dim);
  Tensor input = x;
  const std::vector<int64_t> sizes = sizes_without(x, dim);
  const SumLayout layout = sum_layout(input, dim);
  Tensor sum = torch::stable::new_empty(x, sizes);
  if (layout.outputs() == 0) return sum;
  if (layout.size == 0) return torch::stable::zero_(sum);
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(input.const_data_ptr());
    T* out = static_cast<T*>(sum.mutable_data_ptr());
    const int64_t segments = (layout.size + kSegment - 1) / kSegment;
    const int64_t slabs = (layout.inner + kColumns - 1) / kColumns, blocks = layout.outer * slabs;
    std::vector<A> partial(segments > 1 ? segments * layout.outputs() : 0);
    parallel_rows(blocks * segments, std::min(layout.size, kSegment) * std::min(kColumns, layout.inner),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t item = begin; item < end; ++item) {
                      const int64_t segment = item / blocks, block = item % blocks;
                      const int64_t column = block % slabs * kColumns;
                      const int64_t count = std::min(kColumns, layout.inner - column);
                      const int64_t output = block / slabs * layout.inner + column;
                      A sums[kColumns];
                      sum_segment(in, layout, output, count, segment, sums);
                      if (segments == 1) {
                        for (int64_t i = 0; i < count; ++i) out[output + i] = store<T>(sums[i]);
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
    for (int64_t i = 0; i < layout.outputs(); ++i) out[i] = store<T>(partial[i]);
  });
  return sum;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) { m.def("reduce_sum(Tensor x, SymInt dim) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("reduce_sum", TORCH_BOX(&reduce_sum_cpu)); }

}  // namespace arr_coc
