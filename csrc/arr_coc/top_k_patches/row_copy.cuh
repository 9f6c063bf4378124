// Rows to copy from one tensor to another, and what a warp does with one.
#pragma once

#include "arr_coc/common/cuda.cuh"
#include "arr_coc/top_k_patches/top_k_patches.h"

namespace arr_coc {

// One warp writes f(unit) for each unit of a row: kFlight calls of `read` before the first store.
template <class Unit, int kFlight, class Read, class F>
__device__ __forceinline__ void map_row_as(const char* from, char* to, int64_t bytes, const Read& read, const F& f) {
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  const int64_t units = bytes / int64_t(sizeof(Unit));
  for (int64_t first = threadIdx.x % kWarpSize; first < units; first += kFlight * kWarpSize) {
    Unit values[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i)
      if (first + i * kWarpSize < units) values[i] = read(source + first + i * kWarpSize);
#pragma unroll
    for (int i = 0; i < kFlight; ++i)
      if (first + i * kWarpSize < units) target[first + i * kWarpSize] = f(values[i]);
  }
}

template <class Unit, int kFlight>
__device__ __forceinline__ void copy_row_as(const char* from, char* to, int64_t bytes) {
  map_row_as<Unit, kFlight>(
      from, to, bytes, [](const Unit* unit) { return __ldg(unit); }, [](Unit unit) { return unit; });
}

// kUnit is 16, or 0 where the width is known only here.
template <int kUnit>
__device__ __forceinline__ void copy_row(const char* from, char* to, int64_t bytes, int unit) {
  if (kUnit == 16) return copy_row_as<uint4, 8>(from, to, bytes);
  if (unit == 8) return copy_row_as<uint2, 4>(from, to, bytes);
  if (unit == 4) return copy_row_as<unsigned, 4>(from, to, bytes);
  copy_row_as<unsigned short, 4>(from, to, bytes);
}

// Rows to copy from one tensor to another. Wide rows are copied in segments.
struct RowCopy {
  RowsOf from, to;
  int64_t bytes;    // of a row
  int64_t segment;  // bytes of a segment
  unsigned segments;
  int unit;  // the widest that divides every row's address and length
};

inline RowCopy row_copy(const RowsOf& from, const RowsOf& to, int64_t bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(from.base) | reinterpret_cast<uintptr_t>(to.base) |
                        uint64_t(from.sample_stride | from.row_stride | to.sample_stride | to.row_stride | bytes);
  const int64_t segments = std::clamp<int64_t>(bytes / 8192, 1, 1024);
  const int64_t segment = ceil_div(ceil_div(bytes, segments), 16) * 16;
  return {
      from, to, bytes, segment, unsigned(segments), bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 2};
}

// Calls f with the unit as a constant.
template <class F>
auto with_unit(const RowCopy& rows, const F& f) {
  return rows.unit == 16 ? f(std::integral_constant<int, 16>{}) : f(std::integral_constant<int, 0>{});
}

}  // namespace arr_coc
