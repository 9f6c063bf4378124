#include <torch/csrc/stable/library.h>

#include "arr_coc/allocate_lod_tokens/allocate_lod_tokens.h"
#include "arr_coc/common/vectors.cuh"
#include "arr_coc/select_patches/select_patches.h"
#include "arr_coc/top_k_patches/select_and_place.cuh"

namespace arr_coc {
namespace {

template <class T>
__device__ __forceinline__ T gated(T x, accumulate_t<T> score) {
  return T(accumulate_t<T>(x) * score);
}

template <class T>
__device__ __forceinline__ uint4 gated(const uint4& raw, accumulate_t<T> score) {
  accumulate_t<T> values[kVector<T>];
  unpack<T>(raw, values);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] *= score;
  return pack<T>(values);
}

// One warp multiplies a row by its score. `to` may be `from`, so it must not read through the cache of constants
// (__ldg).
template <class T, class Unit, int kFlight>
__device__ __forceinline__ void gate_row_as(const char* from, char* to, int64_t bytes, accumulate_t<T> score) {
  map_row_as<Unit, kFlight>(
      from, to, bytes, [](const Unit* unit) { return *unit; },
      [score](const Unit& unit) { return gated<T>(unit, score); });
}

// kUnit is 16, or 0 for rows that are not vectors of 16 bytes.
template <class T, int kUnit>
__device__ __forceinline__ void gate_row(const char* from, char* to, int64_t bytes, T score) {
  if constexpr (kUnit == 16) {
    gate_row_as<T, uint4, 8>(from, to, bytes, accumulate_t<T>(score));
  } else {
    gate_row_as<T, T, 4>(from, to, bytes, accumulate_t<T>(score));
  }
}

// What is written for a selected patch beside its features and its index.
template <class T>
struct Details {
  T* scores;
  float2* positions;
  int64_t* tokens;      // null if they depend on the sample's other scores
  float height, width;  // of the grid, in patches
  int64_t columns, min_tokens, spread;
  double gamma;

  // Index is the smallest type that holds every index, because a division of 64 bits takes four times as long.
  template <class Index>
  __device__ __forceinline__ void write(int64_t place, Index index, T score) const {
    scores[place] = score;
    const Index row = index / Index(columns), column = index - row * Index(columns);
    positions[place] = {__fdiv_rn(float(row) + 0.5f, height), __fdiv_rn(float(column) + 0.5f, width)};
    if (tokens) tokens[place] = lod_budget(double(score), min_tokens, spread, gamma);
  }
};

// A chosen row is multiplied by its score on the way to its place.
template <class T, int kUnit>
struct GatedRows {
  RowCopy rows;
  Details<T> details;
  const T* scores;
  int64_t* indices;
  int64_t n;

  __device__ __forceinline__ void operator()(int64_t sample, unsigned k, int64_t index, unsigned rank,
                                             int64_t first) const {
    const T score = scores[sample * n + index];
    gate_row<T, kUnit>(rows.from.row(sample, index) + first, rows.to.row(sample, rank) + first,
                       min(rows.segment, rows.bytes - first), score);
    if (threadIdx.x % kWarpSize != 0 || first != 0) return;
    indices[sample * k + rank] = index;
    details.write(sample * k + rank, unsigned(index), score);
  }
};

constexpr int kGateThreads = 256, kGateWarps = kGateThreads / kWarpSize;

// The same for rows that are in their places, one warp a row segment.
template <class T, int kUnit>
__global__ __launch_bounds__(kGateThreads) void gate_kernel(RowCopy rows, Details<T> details, const T* scores,
                                                            const int64_t* indices, int64_t n, int64_t k,
                                                            int64_t items) {
  for (int64_t item = int64_t(blockIdx.x) * kGateWarps + threadIdx.x / kWarpSize; item < items;
       item += int64_t(gridDim.x) * kGateWarps) {
    const int64_t place = item / rows.segments, first = item % rows.segments * rows.segment;
    const int64_t index = indices[place];
    const T score = scores[place / k * n + index];
    char* row = rows.to.base + place * rows.bytes + first;
    gate_row<T, kUnit>(row, row, min(rows.segment, rows.bytes - first), score);
    if (threadIdx.x % kWarpSize == 0 && first == 0) details.write(place, index, score);
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const SelectPatches<T>& call) {
  const TopKPatches<T>& of = call.selection;
  const AllocateLodTokens<T>& budgets = call.budgets;
  const Details<T> details{call.scores,
                           reinterpret_cast<float2*>(call.positions),
                           budgets.extra ? nullptr : budgets.tokens,
                           float(call.rows),
                           float(call.columns),
                           call.columns,
                           budgets.min_tokens,
                           budgets.spread,
                           budgets.gamma};
  const RowCopy rows = row_copy(of.from, of.to, of.row_bytes);
  const bool placed = with_unit(rows, [&](auto unit) {
    return select_and_place(of.scores, GatedRows<T, unit>{rows, details, of.scores, of.indices, of.n}, of.batch, of.n,
                            of.k, device);
  });
  if (!placed) {
    run(device, of);
    const RowCopy in_place = row_copy(of.to, of.to, of.row_bytes);
    const int64_t items = of.batch * of.k * in_place.segments;
    with_unit(in_place, [&](auto unit) {
      device.launch(gate_kernel<T, unit>, {grid_size(items, kGateWarps), kGateThreads}, in_place, details, of.scores,
                    of.indices, of.n, of.k, items);
    });
  }
  if (budgets.extra) run(device, budgets);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("select_patches", TORCH_BOX(&select_patches<Cuda>)); }

}  // namespace arr_coc
