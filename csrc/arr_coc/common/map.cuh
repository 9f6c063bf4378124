// Elementwise operators on CUDA. common/map.h is the same for the CPU, with the same functions.
#pragma once

#include <utility>

#include "arr_coc/common/vectors.cuh"

namespace arr_coc {

constexpr int kMapThreads = 256;

// A kernel's pointers, in an array for loops.
template <class T, int kCount>
struct MapInputs {
  const T* in[kCount];
};

template <class F, class A, int kCount, int kSize, size_t... Is>
__device__ __forceinline__ A apply_at(const F& f, const A (&values)[kCount][kSize], int i, std::index_sequence<Is...>) {
  return f(values[Is][i]...);
}

// Each thread takes 16 bytes of each tensor; more would not be faster, because there are enough threads to hide memory
// latency. kAligned: every tensor starts on 16 bytes, and the first block computes the elements after the last vector.
template <bool kAligned, class F, class T, int kCount>
__global__ void __launch_bounds__(kMapThreads) map_kernel(F f, T* out, int64_t size, MapInputs<T, kCount> inputs) {
  using A = accumulate_t<T>;
  constexpr auto kEach = std::make_index_sequence<kCount>();
  const int64_t at = (int64_t(blockIdx.x) * kMapThreads + threadIdx.x) * kVector<T>;
  const int64_t whole = kAligned ? size / kVector<T> * kVector<T> : size;
  A values[kCount][kVector<T>], results[kVector<T>];
#pragma unroll
  for (int k = 0; k < kCount; ++k) unpack<T>(load_vector<kAligned>(inputs.in[k], at, whole), values[k]);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) results[i] = apply_at(f, values, i, kEach);
  store_vector<kAligned>(out, at, whole, pack<T>(results));
  if (kAligned && blockIdx.x == 0 && threadIdx.x < size - whole) {
    const int64_t last = whole + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kCount; ++k) values[k][0] = A(inputs.in[k][last]);
    out[last] = T(apply_at(f, values, 0, kEach));
  }
}

template <class T>
unsigned map_blocks(int64_t size) {
  return grid_size(size, kMapThreads * kVector<T>, INT32_MAX);
}

// out[i] = f(in[i]...), computed in T's accumulate type.
template <class F, class T, class... In>
void map(const Cuda& device, const F& f, T* out, int64_t size, const In*... in) {
  if (size == 0) return;
  const auto kernel =
      start_on_16_bytes(out, in...) ? map_kernel<true, F, T, sizeof...(In)> : map_kernel<false, F, T, sizeof...(In)>;
  device.launch(kernel, {map_blocks<T>(size), kMapThreads}, f, out, size, MapInputs<T, sizeof...(In)>{{in...}});
}

// kWhole: rows are whole vectors, and `row` starts on 16 bytes.
template <bool kAligned, bool kWhole, class F, class T>
__global__ void __launch_bounds__(kMapThreads)
    map_rows_kernel(F f, T* out, int64_t size, const T* x, const T* row, int64_t width) {
  using A = accumulate_t<T>;
  const int64_t at = (int64_t(blockIdx.x) * kMapThreads + threadIdx.x) * kVector<T>;
  if (at >= size) return;
  const bool all = kAligned && (kWhole || at + kVector<T> <= size);
  A values[kVector<T>], of_row[kVector<T>];
  unpack<T>(all ? load_vector<kAligned>(x, at, size) : load_vector<false>(x, at, size), values);
  // A 64-bit division costs several times as much.
  int64_t column = size <= int64_t(UINT32_MAX) ? int64_t(uint32_t(at) % uint32_t(width)) : at % width;
  if constexpr (kWhole) {
    unpack<T>(load_vector<true>(row, column, width), of_row);
  } else {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      of_row[i] = A(row[column]);
      if (++column == width) column = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] = f(values[i], of_row[i]);
  if (all)
    store_vector<kAligned>(out, at, size, pack<T>(values));
  else
    store_vector<false>(out, at, size, pack<T>(values));
}

// out[i] = f(x[i], row[i % width]).
template <class F, class T>
void map_rows(const Cuda& device, const F& f, T* out, int64_t size, const T* x, const T* row, int64_t width) {
  if (size == 0) return;
  const bool aligned = start_on_16_bytes(out, x);
  const auto kernel = aligned && has_whole_vectors(row, width) ? map_rows_kernel<true, true, F, T>
                      : aligned                                ? map_rows_kernel<true, false, F, T>
                                                               : map_rows_kernel<false, false, F, T>;
  device.launch(kernel, {map_blocks<T>(size), kMapThreads}, f, out, size, x, row, width);
}

}  // namespace arr_coc
