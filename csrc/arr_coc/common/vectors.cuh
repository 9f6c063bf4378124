// Loads, unpacks and stores 16 bytes of a tensor at a time on CUDA.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "arr_coc/common/cuda.cuh"

namespace arr_coc {

// The elements of T in the 16 bytes that a lane loads at once. An element's lane and slot depend only on its place in
// the row, so a row has the same bits whether or not it is aligned, and beside any other rows.
template <class T>
constexpr int kVector = 16 / sizeof(T);

// Whether rows of `width` elements from `data` on can be read and written 16 bytes at a time.
template <class T>
bool has_whole_vectors(const T* data, int64_t width) {
  return width % kVector<T> == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// row[at, at + kVector), still packed; zeros from `width` on.
template <bool kAligned, class T>
__device__ __forceinline__ uint4 load_vector(const T* row, int64_t at, int64_t width) {
  uint4 raw = {0, 0, 0, 0};
  if constexpr (kAligned) {
    if (at < width) raw = *reinterpret_cast<const uint4*>(row + at);
  } else {
    T values[kVector<T>];
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) values[i] = at + i < width ? row[at + i] : T(0.f);
    memcpy(&raw, values, sizeof(raw));
  }
  return raw;
}

template <class T, class A>
__device__ __forceinline__ void unpack(const uint4& raw, A (&values)[kVector<T>]) {
  T packed[kVector<T>];
  memcpy(packed, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] = A(packed[i]);
}

// Half types are rounded two at a time by one instruction.
template <class T, class A>
__device__ __forceinline__ uint4 pack(const A (&values)[kVector<T>]) {
  uint4 raw;
  if constexpr (std::is_same_v<T, Half>) {
    __half2 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
    memcpy(&raw, pairs, sizeof(raw));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    memcpy(&raw, pairs, sizeof(raw));
  } else {
    memcpy(&raw, values, sizeof(raw));
  }
  return raw;
}

template <bool kAligned, class T>
__device__ __forceinline__ void store_vector(T* row, int64_t at, int64_t width, const uint4& raw) {
  if constexpr (kAligned) {
    if (at < width) *reinterpret_cast<uint4*>(row + at) = raw;
  } else {
    T values[kVector<T>];
    memcpy(values, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i)
      if (at + i < width) row[at + i] = values[i];
  }
}

}  // namespace arr_coc
