// The curves of colour.h for CUDA.
#pragma once

#include "arr_coc/common/colour.h"
#include "arr_coc/common/cuda.cuh"

namespace arr_coc {

template <class A>
struct CudaCurves;

template <>
struct CudaCurves<float> {
  // The hardware's own base-2 logarithm and exponential, about 1e-7 off and 16 a clock; every argument that counts is
  // far from the subnormals that .ftz gives up. powf and cbrtf take half as long again for the whole kernel, and the
  // error in LAB is that of ATen's float32 or less, from [0, 1] to values of 1e12.
  static __device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  static __device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

  static __device__ __forceinline__ Point<float> linear(float c) {
    const bool curved = c > float(kLinearKnee);  // not for NaN, which the straight piece keeps
    const float base = fmaf(c, float(1 / 1.055), float(0.055 / 1.055));
    // base^1.4: both the slope's and most of the value's. The logarithm's error counts by what it is multiplied with.
    const float power = base * power_of_two(0.4f * log2_approx(base));
    return {curved ? base * power : c * float(kLinearSlope), curved ? float(2.4 / 1.055) * power : float(kLinearSlope)};
  }

  static __device__ __forceinline__ Point<float> compress(float t) {
    const bool above = t > float(kCompressKnee);
    const float r = power_of_two(log2_approx(t) * float(-1.0 / 3));
    const float root = t * r * r;
    // One Newton step. Infinity would become NaN here and stays itself on the straight piece.
    const float h = fmaf(-root, r, 1.0f), refined = fmaf(root * h, float(2.0 / 3), root);
    const float slope = above ? r * r * float(1.0 / 3) : float(kCompressSlope);
    return {above && t < INFINITY ? refined : fmaf(float(kCompressSlope), t, float(kCompressOffset)),
            t == t ? slope : t};
  }
};

template <>
struct CudaCurves<double> {
  static __device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

  static __device__ __forceinline__ Point<double> linear(double c) {
    if (!(c > kLinearKnee)) return {c * kLinearSlope, kLinearSlope};
    const double base = (c + 0.055) * (1 / 1.055), power = pow(base, 1.4);
    return {base * power, 2.4 / 1.055 * power};
  }

  static __device__ __forceinline__ Point<double> compress(double t) {
    if (!(t > kCompressKnee)) return {kCompressSlope * t + kCompressOffset, t == t ? kCompressSlope : t};
    const double root = cbrt(t);
    return {root, 1 / (3 * root * root)};
  }
};

}  // namespace arr_coc
