#include <torch/csrc/stable/library.h>

#include "arr_coc/common/held_rows.cuh"
#include "arr_coc/rms_norm_quantize/rms_norm_quantize.h"

namespace arr_coc {
namespace {

// max(|b|, a); NaN wins.
__device__ __forceinline__ float highest(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
}
__device__ __forceinline__ double highest(double a, double b) { return nan_max(a, fabs(b)); }

// Computes scale and factor from a row's sum of squares and largest |x w|: quantized = round(x w factor).
template <class A>
struct Quantizer {
  __device__ Quantizer(A squares, A top, int64_t width, A eps) {
    const A inverse_rms = 1 / sqrt(squares / A(width) + eps);
    const A amax = top > 0 ? top * inverse_rms : top;  // a row of zeros stays zero even if 1 / rms is infinite
    scale = float(amax / A(kQuantizedMax));
    if (scale < kScaleMin) scale = 0;
    factor = inverse_rms / A(scale);
    counts = scale > 0 && scale < INFINITY;
  }

  // To the nearest integer, ties to even. |x w factor| exceeds 127 by rounding errors at most, so no clamp is needed.
  // Adding 1.5 * 2^23 rounds and leaves the integer in the low byte of the sum.
  __device__ __forceinline__ int8_t operator()(float value) const {
    return int8_t(counts ? __float_as_int(fmaf(value, factor, 12582912.f)) : 0);
  }
  __device__ __forceinline__ int8_t operator()(double value) const {
    return int8_t(counts ? __double2int_rn(value * factor) : 0);
  }

  A factor;
  float scale;
  bool counts;
};

template <class A>
struct SumAndMax {
  __device__ A operator()(int which, A a, A b) const { return which == 0 ? a + b : highest(a, b); }
};

template <class T, class A>
__device__ __forceinline__ void look_at(const uint4& x, const uint4& weight, A (&products)[kVector<T>], A (&found)[2]) {
  A values[kVector<T>], weights[kVector<T>];
  unpack<T>(x, values);
  unpack<T>(weight, weights);
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) {
    products[j] = values[j] * weights[j];
    found[0] += values[j] * values[j];
    found[1] = highest(found[1], products[j]);
  }
}

template <class T, int kVectors, bool kBlock, bool kAligned>
__global__ void __launch_bounds__(kBlock ? kRowThreads : kRowWarps* kWarpSize)
    held_rows_kernel(RmsNormQuantize<T> call) {
  using A = accumulate_t<T>;
  __shared__ A shared[2][kRowThreads / kWarpSize][2];
  const RowGroup<kBlock> group;
  int parity = 0;
  for (int64_t row = group.first; row < call.rows; row += group.stride, parity ^= 1) {
    uint4 x[kVectors], weight[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      x[i] = load_vector<kAligned>(call.x + row * call.width, group.template at<T>(i), call.width);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      weight[i] = load_vector<kAligned>(call.weight, group.template at<T>(i), call.width);
    A products[kVectors][kVector<T>], found[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) look_at<T>(x[i], weight[i], products[i], found);
    group.combine(found, shared[parity], A(0), SumAndMax<A>());
    const Quantizer<A> quantizer(found[0], found[1], call.width, call.eps);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int8_t values[kVector<T>];
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) values[j] = quantizer(products[i][j]);
      store_values<kAligned>(call.quantized + row * call.width, group.template at<T>(i), call.width, values);
    }
    if (group.lane == 0) call.scale[row] = quantizer.scale;
  }
}

// Rows too long for the registers of a block are read twice, the second time mostly from the L2 cache.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads) long_rows_kernel(RmsNormQuantize<T> call) {
  using A = accumulate_t<T>;
  __shared__ A shared[2][kRowThreads / kWarpSize][2];
  const RowGroup<true> group;
  int parity = 0;
  for (int64_t row = group.first; row < call.rows; row += group.stride, parity ^= 1) {
    const T* x = call.x + row * call.width;
    A products[kVector<T>], found[2] = {0, 0};
    const int64_t step = group.template at<T>(1) - group.template at<T>(0);
#pragma unroll 4
    for (int64_t at = group.template at<T>(0); at < call.width; at += step)
      look_at<T>(load_vector<kAligned>(x, at, call.width), load_vector<kAligned>(call.weight, at, call.width), products,
                 found);
    group.combine(found, shared[parity], A(0), SumAndMax<A>());
    const Quantizer<A> quantizer(found[0], found[1], call.width, call.eps);
#pragma unroll 4
    for (int64_t at = group.template at<T>(0); at < call.width; at += step) {
      int8_t values[kVector<T>];
      look_at<T>(load_vector<kAligned>(x, at, call.width), load_vector<kAligned>(call.weight, at, call.width), products,
                 found);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) values[j] = quantizer(products[j]);
      store_values<kAligned>(call.quantized + row * call.width, at, call.width, values);
    }
    if (group.lane == 0) call.scale[row] = quantizer.scale;
  }
}

template <class T, bool kAligned>
void launch(const RmsNormQuantize<T>& call, const Cuda& device) {
  const bool held = for_held_rows<T>(call.width, kRowThreads, [&](auto vectors, auto is_block, unsigned threads) {
    const unsigned blocks =
        grid_size(call.rows, is_block ? 2 : 2 * kRowWarps);  // two rows each, so that fewer blocks start
    device.launch(held_rows_kernel<T, vectors, is_block, kAligned>, {blocks, threads}, call);
  });
  if (!held) device.launch(long_rows_kernel<T, kAligned>, {grid_size(call.rows, 1), kRowThreads}, call);
}

}  // namespace

template <class T>
void run(const Cuda& device, const RmsNormQuantize<T>& call) {
  const bool aligned = has_whole_vectors(call.x, call.width) && has_whole_vectors(call.weight, call.width);
  aligned ? launch<T, true>(call, device) : launch<T, false>(call, device);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("rms_norm_quantize", TORCH_BOX(&rms_norm_quantize<Cuda>)); }

}  // namespace arr_coc
