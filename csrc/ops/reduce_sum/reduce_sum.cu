#include <torch/csrc/stable/library.h>

#include "common/held_rows.cuh"
#include "ops/reduce_sum/reduce_sum.h"

namespace arr_coc {
namespace {

// The tree, which is the same whatever lies beside the elements in memory, so that no stride and no other element of
// the tensor shows in a result. Runs of 8 elements are summed in pairs. Segments of 4 x 32 runs: runs 32 apart are
// added in order, and the 32 sums in pairs 16, 8, 4, 2 and 1 apart. The sums of the segments are summed like elements.
constexpr int kRun = 8;
constexpr int kLanes = 32;
constexpr int kRounds = 4;
constexpr int64_t kSegment = kRun * kLanes * kRounds;

constexpr int kWarps = 8;

// Below this many elements a thread sums alone.
constexpr int64_t kAlone = 32;

template <class A>
__device__ __forceinline__ A sum_of_run(const A (&v)[kRun]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

template <class I, class O>
struct Call {
  const I* x;
  O* out;  // [outer, segments, inner]
  SumLayout layout;
  int64_t segments;
};

// Neighbouring elements of `row`, kRun of them from `at` on, zeros from `end` on.
template <bool kAligned, class I, class A>
__device__ __forceinline__ void load_run(const I* row, int64_t stride, int at, int end, A (&values)[kRun]) {
  if (kAligned && at + kRun <= end) {
#pragma unroll
    for (int i = 0; i < kRun; i += kVector<I>) {
      A part[kVector<I>];
      unpack<I>(*reinterpret_cast<const uint4*>(row + at + i), part);
#pragma unroll
      for (int j = 0; j < kVector<I>; ++j) values[i + j] = part[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = at + i < end ? A(row[(at + i) * stride]) : A(0);
  }
}

// Along memory: a warp takes a segment. With kJoin the warps of a block take all segments of one sum, kRun at most.
template <class I, class O, bool kAligned, bool kJoin>
__global__ void __launch_bounds__(kWarps* kWarpSize) inner_sum_kernel(Call<I, O> call) {
  using A = accumulate_t<I>;
  __shared__ A joined[kRun];
  const SumLayout& layout = call.layout;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int64_t items = layout.outer * layout.inner * (kJoin ? 1 : call.segments);
  for (int64_t first = blockIdx.x; kJoin ? first < items : first * warps < items; first += gridDim.x) {
    const int64_t item = kJoin ? first : first * warps + warp;
    if (!kJoin && item >= items) return;
    const int64_t output = kJoin ? item : item / call.segments, segment = kJoin ? warp : item % call.segments;
    const I* row = call.x + output / layout.inner * layout.outer_stride + output % layout.inner * layout.inner_stride +
                   segment * kSegment;
    const int end = int(min(kSegment, layout.size - segment * kSegment));
    A sum[1] = {0};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      A values[kRun];
      load_run<kAligned>(row, 1, (round * kLanes + lane) * kRun, end, values);
      sum[0] += sum_of_run(values);
    }
    sum[0] = warp_sum(sum[0]);
    if constexpr (kJoin) {
      __syncthreads();  // the sums before have been read
      if (lane == 0) joined[warp] = sum[0];
      __syncthreads();
      if (threadIdx.x != 0) continue;
      A values[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) values[i] = i < warps ? joined[i] : A(0);
      call.out[output] = O(sum_of_run(values));
    } else if (lane == 0) {
      call.out[(output / layout.inner * call.segments + segment) * layout.inner + output % layout.inner] = O(sum[0]);
    }
  }
}

// Across memory: a thread takes kColumns neighbouring sums; the warps of a block take the runs of a segment between
// them, or each thread all of them if they are few.
template <class I, class O, int kColumns, bool kAlone>
__global__ void __launch_bounds__(kWarps* kWarpSize) outer_sum_kernel(Call<I, O> call) {
  using A = accumulate_t<I>;
  __shared__ A shared[kAlone ? 1 : kWarps][kColumns][kWarpSize];
  const SumLayout& layout = call.layout;
  const int64_t outputs = layout.outer * layout.inner;
  const int64_t slab_columns = int64_t(kAlone ? blockDim.x : kWarpSize) * kColumns;
  const int64_t slabs = (outputs + slab_columns - 1) / slab_columns;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int64_t item = blockIdx.x; item < slabs * call.segments; item += gridDim.x) {
    const int64_t segment = item / slabs;
    const int64_t output = item % slabs * slab_columns + (kAlone ? threadIdx.x : lane) * kColumns;
    const bool active = output < outputs;
    const int64_t o = output / layout.inner, i = output % layout.inner;
    const I* column = call.x + o * layout.outer_stride + i * layout.inner_stride + segment * kSegment * layout.stride;
    const int end = active ? int(min(kSegment, layout.size - segment * kSegment)) : 0;

    auto add_runs = [&](int residue, A(&sum)[kColumns]) {
#pragma unroll 2
      for (int at = residue * kRun; at < end; at += kLanes * kRun) {
        A values[kColumns][kRun];
        uint4 raw[kRun];
#pragma unroll
        for (int r = 0; r < kRun; ++r) {
          if constexpr (kColumns == 1) {
            values[0][r] = at + r < end ? A(column[(at + r) * layout.stride]) : A(0);
          } else {
            raw[r] = at + r < end ? *reinterpret_cast<const uint4*>(column + (at + r) * layout.stride) : uint4{};
          }
        }
        if constexpr (kColumns > 1) {
#pragma unroll
          for (int r = 0; r < kRun; ++r) {
            A part[kVector<I>];
            unpack<I>(raw[r], part);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) values[c][r] = part[c];
          }
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[c] += sum_of_run(values[c]);
      }
    };
    // Sums of runs whose number is `residue` or 8 or 16 or 24 more, modulo 32.
    auto add_residues = [&](int residue, A(&sum)[kColumns]) {
      A other[kColumns] = {}, more[kColumns] = {}, last[kColumns] = {};
      add_runs(residue, sum);
      if (end > 8 * kRun) {
        add_runs(residue + 16, other);
        add_runs(residue + 8, more);
        add_runs(residue + 24, last);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[c] = (sum[c] + other[c]) + (more[c] + last[c]);
      }
    };

    A sum[kColumns] = {};
    if constexpr (kAlone) {
      A s1[kColumns] = {}, s2[kColumns] = {}, s3[kColumns] = {};
      add_runs(0, sum);
      add_runs(1, s1);
      add_runs(2, s2);
      add_runs(3, s3);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] = (sum[c] + s2[c]) + (s1[c] + s3[c]);
    } else {
      add_residues(warp, sum);
      __syncthreads();  // the sums before have been read
#pragma unroll
      for (int c = 0; c < kColumns; ++c) shared[warp][c][lane] = sum[c];
      __syncthreads();
      if (warp != 0) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        auto at = [&](int w) { return shared[w][c][lane]; };
        sum[c] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
      }
    }
    if (!active) continue;
    O* out = call.out + (o * call.segments + segment) * layout.inner + i;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] = O(sum[c]);
  }
}

// The sums of every segment: [outer, segments, inner], or the result where there is one segment or a block joins them.
template <class I, class O>
void launch(const Call<I, O>& call, bool join, cudaStream_t stream) {
  const SumLayout& layout = call.layout;
  const bool starts_whole = reinterpret_cast<uintptr_t>(call.x) % 16 == 0 && layout.outer_stride % kVector<I> == 0;
  if (layout.stride == 1 && layout.size > kAlone) {
    const bool aligned = starts_whole && layout.inner_stride % kVector<I> == 0;
    if (join) {
      const unsigned threads = unsigned(call.segments) * kWarpSize, blocks = grid_size(layout.outputs(), 1);
      aligned ? inner_sum_kernel<I, O, true, true><<<blocks, threads, 0, stream>>>(call)
              : inner_sum_kernel<I, O, false, true><<<blocks, threads, 0, stream>>>(call);
    } else {
      const unsigned threads = kWarps / 2 * kWarpSize, blocks = grid_size(layout.outputs() * call.segments, kWarps / 2);
      aligned ? inner_sum_kernel<I, O, true, false><<<blocks, threads, 0, stream>>>(call)
              : inner_sum_kernel<I, O, false, false><<<blocks, threads, 0, stream>>>(call);
    }
  } else {
    constexpr int kColumns = kVector<I>;
    const bool aligned =
        starts_whole && layout.inner_stride == 1 && layout.inner % kColumns == 0 && layout.stride % kColumns == 0;
    const bool alone = layout.size <= kAlone;
    const int64_t threads = alone ? 128 : kWarps * kWarpSize,
                  columns = (alone ? threads : kWarpSize) * (aligned ? kColumns : 1);
    const unsigned blocks = grid_size((layout.outputs() + columns - 1) / columns * call.segments, 1);
    if (aligned) {
      alone ? outer_sum_kernel<I, O, kColumns, true><<<blocks, threads, 0, stream>>>(call)
            : outer_sum_kernel<I, O, kColumns, false><<<blocks, threads, 0, stream>>>(call);
    } else {
      alone ? outer_sum_kernel<I, O, 1, true><<<blocks, threads, 0, stream>>>(call)
            : outer_sum_kernel<I, O, 1, false><<<blocks, threads, 0, stream>>>(call);
    }
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class I, class O>
void reduce(const I* x, O* out, const SumLayout& layout, const Tensor& like, cudaStream_t stream) {
  using A = accumulate_t<I>;
  const int64_t segments = (layout.size + kSegment - 1) / kSegment;
  const bool join = layout.stride == 1 && 1 < segments && segments <= kRun;
  if (segments == 1 || join) return launch(Call<I, O>{x, out, layout, segments}, join, stream);
  Tensor partial = torch::stable::new_empty(like, {layout.outputs() * segments},
                                            std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float);
  A* sums = static_cast<A*>(partial.mutable_data_ptr());
  launch(Call<I, A>{x, sums, layout, segments}, false, stream);
  SumLayout rest = layout;
  rest.size = segments;
  rest.outer_stride = segments * layout.inner, rest.stride = layout.inner, rest.inner_stride = 1;
  reduce(static_cast<const A*>(sums), out, rest, like, stream);
}

Tensor reduce_sum_cuda(const Tensor& x, int64_t dim) {
  check_reduce_sum(x, dim);
  const CudaScope scope(x);
  Tensor input = x;
  const std::vector<int64_t> sizes = sizes_without(x, dim);
  const SumLayout layout = sum_layout(input, dim);
  Tensor sum = torch::stable::new_empty(x, sizes);
  if (layout.outputs() == 0) return sum;
  if (layout.size == 0) return torch::stable::zero_(sum);
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    reduce(static_cast<const T*>(input.const_data_ptr()), static_cast<T*>(sum.mutable_data_ptr()), layout, input,
           scope.stream());
  });
  return sum;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("reduce_sum", TORCH_BOX(&reduce_sum_cuda)); }

}  // namespace arr_coc
