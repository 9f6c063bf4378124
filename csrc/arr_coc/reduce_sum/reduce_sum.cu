#include <torch/csrc/stable/library.h>

#include "arr_coc/common/held_rows.cuh"
#include "arr_coc/reduce_sum/reduce_sum.h"

namespace arr_coc {
namespace {

// The tree of additions does not depend on strides or on other elements of the tensor. Runs of 8 elements are summed in
// pairs. In segments of 4 x 32 runs, runs 32 apart are added in order, then the 32 sums in pairs 16, 8, 4, 2 and 1
// apart. The sums of segments are summed like elements.
constexpr int kRun = 8;
constexpr int kLanes = 32;
constexpr int kRounds = 4;
constexpr int64_t kSegment = kRun * kLanes * kRounds;

constexpr int kWarps = 8;

// The most elements that one thread sums alone if it cannot load 16 bytes at once.
constexpr int64_t kAlone = 32;

template <class A>
__device__ __forceinline__ A sum_of_run(const A (&v)[kRun]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

template <class I, class O>
struct Call {
  const I* x;
  O* out;  // along memory [outer, inner, segments], across it [outer, segments, inner]
  SumLayout layout;
  int64_t segments;
};

// A 64-bit division is a call of a hundred instructions, which matters for short rows.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 ? a / b : int64_t(unsigned(a) / unsigned(b));
}

// The lanes that share a run, so that their loads are adjacent.
template <class I>
constexpr int kSharing = kRun / kVector<I>;

// The 16-byte loads that a thread has in flight.
constexpr int kLoads = 8;

// The segments that a group takes at once for that many loads.
template <class I, int kRounds>
constexpr int kItemsAtOnce = std::max(1, kLoads / (kRounds * kSharing<I>));

// The sum of 16 bytes, part of a run.
template <class I, class A>
__device__ __forceinline__ A sum_of_vector(const uint4& raw) {
  A v[kVector<I>];
  unpack<I>(raw, v);
#pragma unroll
  for (int apart = 1; apart < kVector<I>; apart *= 2) {
#pragma unroll
    for (int j = 0; j < kVector<I>; j += 2 * apart) v[j] += v[j + apart];
  }
  return v[0];
}

// Along memory: a group of lanes, a whole warp or the fewest that hold a short row, takes a segment; load number v of a
// round takes the group's vectors v * group + lane, so that it ends up with run (lane % kSharing) * group / kSharing +
// lane / kSharing. With kJoin the warps of a block take all segments of one sum, kRun at most.
template <class I, class O, bool kAligned, int kRounds, bool kJoin>
__global__ void __launch_bounds__(kWarps* kWarpSize) inner_sum_kernel(Call<I, O> call, int lanes) {
  using A = accumulate_t<I>;
  constexpr int kShare = kSharing<I>, kItems = kJoin ? 1 : kItemsAtOnce<I, kRounds>;
  __shared__ A joined[kRun];
  const SumLayout& layout = call.layout;
  const int group = kRounds > 1 ? kWarpSize : lanes, lane = threadIdx.x & (group - 1);
  const int warp = threadIdx.x / kWarpSize, groups = kJoin ? 1 : blockDim.x / group;
  const int64_t items = layout.outer * layout.inner * (kJoin ? 1 : call.segments);
  const int64_t tile = groups * kItems;
  for (int64_t first = blockIdx.x * tile; first < items; first += gridDim.x * tile) {
    uint4 raw[kItems][kRounds][kShare];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int64_t item = kJoin ? first : first + k * groups + threadIdx.x / group;
      const int64_t output = kJoin || call.segments == 1 ? item : quotient(item, call.segments);
      const int64_t outer = layout.outer == 1 ? 0 : quotient(output, layout.inner);
      const int64_t begin = (kJoin ? warp : item - output * call.segments) * kSegment;
      const int end = item < items ? int(min(kSegment, layout.size - begin)) : 0;
      const I* row =
          call.x + outer * layout.outer_stride + (output - outer * layout.inner) * layout.inner_stride + begin;
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
#pragma unroll
        for (int v = 0; v < kShare; ++v)
          raw[k][round][v] = load_vector<kAligned>(row, round * kLanes * kRun + (v * group + lane) * kVector<I>, end);
      }
    }
    A sums[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      sums[k] = 0;
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        A parts[kShare];
#pragma unroll
        for (int v = 0; v < kShare; ++v) parts[v] = sum_of_vector<I, A>(raw[k][round][v]);
#pragma unroll
        for (int apart = 1; apart < kShare; apart *= 2) {
#pragma unroll
          for (int j = 0; j < kShare / 2 / apart; ++j) {
            const bool odd = lane & apart;
            const A kept = odd ? parts[2 * j + 1] : parts[2 * j], other = odd ? parts[2 * j] : parts[2 * j + 1];
            parts[j] = kept + __shfl_xor_sync(0xffffffffu, other, apart);
          }
        }
        sums[k] += parts[0];
      }
    }
    auto add_lanes = [&](int apart) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], apart);
    };
#pragma unroll
    for (int apart = kShare / 2; apart > 0; apart /= 2) add_lanes(apart);
#pragma unroll
    for (int apart = kWarpSize / 2; apart >= kShare; apart /= 2)
      if (apart < group) add_lanes(apart);
    if constexpr (kJoin) {
      __syncthreads();  // the sums before have been read
      if (lane == 0) joined[warp] = sums[0];
      __syncthreads();
      if (threadIdx.x != 0) continue;
      A values[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) values[i] = i < call.segments ? joined[i] : A(0);
      call.out[first] = O(sum_of_run(values));
    } else if (lane == 0) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int64_t item = first + k * groups + threadIdx.x / group;
        if (item < items) call.out[item] = O(sums[k]);
      }
    }
  }
}

// Across memory: a thread takes kColumns neighbouring sums. The warps of a block share the runs of a segment; if there
// are few runs, each thread takes all of them.
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

// Across memory, for the sums of at most kRun segments: a block takes all segments of kWidth neighbouring sums, which
// kAcross threads read beside one another, and each thread all rounds of one run, to have many loads in flight.
template <class I>
struct Joined {
  static constexpr int kColumns = 8 / sizeof(I), kAcross = 4, kWidth = kColumns * kAcross;
  static constexpr int threads(int64_t segments) { return int(segments) * kLanes * kAcross; }
  struct alignas(8) Vector {
    I values[kColumns];
  };
};

template <class I, class O>
__global__ void __launch_bounds__(Joined<I>::threads(kRun)) joined_outer_sum_kernel(Call<I, O> call) {
  using A = accumulate_t<I>;
  using Vector = typename Joined<I>::Vector;
  constexpr int kColumns = Joined<I>::kColumns, kAcross = Joined<I>::kAcross, kWidth = Joined<I>::kWidth;
  __shared__ A shared[kRun * kLanes][kWidth];
  const SumLayout& layout = call.layout;
  const int across = threadIdx.x % kAcross * kColumns, run = threadIdx.x / kAcross, segment = run / kLanes;
  const int begin = segment * int(kSegment) + run % kLanes * kRun;
  const int64_t tiles = (layout.inner + kWidth - 1) / kWidth;
  for (int64_t item = blockIdx.x; item < layout.outer * tiles; item += gridDim.x) {
    const int64_t outer = quotient(item, tiles), inner = (item - outer * tiles) * kWidth;
    const int end = inner + across < layout.inner ? int(layout.size) : 0;
    const I* column = call.x + outer * layout.outer_stride + inner + across;
    A sum[kColumns] = {};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      Vector raw[kRun];
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
        const int at = begin + round * kLanes * kRun + r;
        raw[r] = at < end ? *reinterpret_cast<const Vector*>(column + at * layout.stride) : Vector{};
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        A values[kRun];
#pragma unroll
        for (int r = 0; r < kRun; ++r) values[r] = A(raw[r].values[c]);
        sum[c] += sum_of_run(values);
      }
    }
    __syncthreads();  // the sums before have been read
#pragma unroll
    for (int c = 0; c < kColumns; ++c) shared[run][across + c] = sum[c];
    for (int half = kLanes / 2; half > 0; half /= 2) {
      __syncthreads();
      for (int at = threadIdx.x; at < int(call.segments) * half * kWidth; at += blockDim.x) {
        A* row = shared[at / (half * kWidth) * kLanes + at / kWidth % half];
        row[at % kWidth] += row[half * kWidth + at % kWidth];
      }
    }
    __syncthreads();
    if (threadIdx.x < kWidth && inner + threadIdx.x < layout.inner) {
      A values[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) values[i] = i < call.segments ? shared[i * kLanes][threadIdx.x] : A(0);
      call.out[outer * layout.inner + inner + threadIdx.x] = O(sum_of_run(values));
    }
  }
}

template <class I, class O, bool kAligned>
void launch_inner(const Call<I, O>& call, bool join, const Cuda& device) {
  constexpr int kThreads = kWarps / 2 * kWarpSize;
  const int64_t items = call.layout.outputs() * call.segments;
  if (join) {
    device.launch(inner_sum_kernel<I, O, kAligned, kRounds, true>,
                  {grid_size(call.layout.outputs(), 1), unsigned(call.segments) * kWarpSize}, call, kWarpSize);
  } else if (call.layout.size > kLanes * kRun) {
    const unsigned blocks = grid_size(items, kWarps / 2 * kItemsAtOnce<I, kRounds>);
    device.launch(inner_sum_kernel<I, O, kAligned, kRounds, false>, {blocks, kThreads}, call, kWarpSize);
  } else {
    int lanes = kSharing<I>;
    while (lanes * kRun < call.layout.size) lanes *= 2;
    const unsigned blocks = grid_size(items, kThreads / lanes * kItemsAtOnce<I, 1>);
    device.launch(inner_sum_kernel<I, O, kAligned, 1, false>, {blocks, kThreads}, call, lanes);
  }
}

// Computes the sums of every segment, or the result if there is one segment or a block joins them.
template <class I, class O>
void launch(const Call<I, O>& call, bool join, const Cuda& device) {
  const SumLayout& layout = call.layout;
  const bool starts_whole = reinterpret_cast<uintptr_t>(call.x) % 16 == 0 && layout.outer_stride % kVector<I> == 0;
  const bool whole = starts_whole && layout.inner_stride % kVector<I> == 0 && layout.size % kVector<I> == 0;
  if (layout.stride == 1 && (whole || layout.size > kAlone)) {
    whole ? launch_inner<I, O, true>(call, join, device) : launch_inner<I, O, false>(call, join, device);
  } else {
    constexpr int kColumns = kVector<I>;
    const bool aligned =
        starts_whole && layout.inner_stride == 1 && layout.inner % kColumns == 0 && layout.stride % kColumns == 0;
    const bool alone = layout.size <= kAlone;
    const unsigned threads = alone ? 128 : kWarps * kWarpSize;
    const int64_t columns = (alone ? threads : kWarpSize) * (aligned ? kColumns : 1);
    const unsigned blocks = grid_size((layout.outputs() + columns - 1) / columns * call.segments, 1);
    if (join) {
      const int64_t tiles = layout.outer * ((layout.inner + Joined<I>::kWidth - 1) / Joined<I>::kWidth);
      device.launch(joined_outer_sum_kernel<I, O>, {grid_size(tiles, 1), Joined<I>::threads(call.segments)}, call);
    } else {
      const auto kernel =
          aligned ? (alone ? outer_sum_kernel<I, O, kColumns, true> : outer_sum_kernel<I, O, kColumns, false>)
                  : (alone ? outer_sum_kernel<I, O, 1, true> : outer_sum_kernel<I, O, 1, false>);
      device.launch(kernel, {blocks, threads}, call);
    }
  }
}

// Whether joined_outer_sum_kernel can take these sums, and is faster: where outer_sum_kernel would have few blocks.
template <class I>
bool joins_across(const I* x, const SumLayout& layout, int64_t segments) {
  constexpr int kColumns = Joined<I>::kColumns;
  return layout.size > kLanes * kRun && layout.inner_stride == 1 && layout.inner % kColumns == 0 &&
         layout.stride % kColumns == 0 && layout.outer_stride % kColumns == 0 &&
         reinterpret_cast<uintptr_t>(x) % sizeof(typename Joined<I>::Vector) == 0 &&
         ceil_div(layout.outputs(), kWarpSize * kVector<I>) * segments <
             device_attribute(cudaDevAttrMultiProcessorCount);
}

template <class I, class O>
void reduce(const Cuda& device, const I* x, O* out, const SumLayout& layout) {
  using A = accumulate_t<I>;
  const int64_t segments = (layout.size + kSegment - 1) / kSegment;
  const bool join = segments <= kRun && (layout.stride == 1 ? segments > 1 : joins_across(x, layout, segments));
  if (segments == 1 || join) return launch(Call<I, O>{x, out, layout, segments}, join, device);
  Scratch<A> sums(device, layout.outputs() * segments);
  launch(Call<I, A>{x, sums.data(), layout, segments}, false, device);
  SumLayout rest = layout;
  rest.size = segments;
  rest.outer_stride = segments * layout.inner;
  rest.stride = layout.stride == 1 ? 1 : layout.inner, rest.inner_stride = layout.stride == 1 ? segments : 1;
  reduce(device, static_cast<const A*>(sums.data()), out, rest);
}

}  // namespace

template <class T>
void run(const Cuda& device, const ReduceSum<T>& call) {
  reduce(device, call.x, call.out, call.layout);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("reduce_sum", TORCH_BOX(&reduce_sum<Cuda>)); }

}  // namespace arr_coc
