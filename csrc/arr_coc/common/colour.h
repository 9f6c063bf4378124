// sRGB to CIE LAB (D65) and to luma, forward and backward, for the CPU and for CUDA. A `Curves` class has the two steps
// that compute a power: CpuCurves below, CudaCurves in colour.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ARR_COC_INLINE __host__ __device__ __forceinline__
#else
#define ARR_COC_INLINE inline __attribute__((always_inline))
#endif

namespace arr_coc {

// The weights of Rec. 601, for encoded values.
constexpr double kLumaR = 0.299, kLumaG = 0.587, kLumaB = 0.114;

// linear(c): c / 12.92 up to the knee, ((c + 0.055) / 1.055)^2.4 above.
constexpr double kLinearKnee = 0.04045, kLinearSlope = 1 / 12.92;
// compress(t), CIE's f: 7.787 t + 4/29 up to the knee, the cube root above.
constexpr double kCompressKnee = 0.008856, kCompressSlope = 7.787, kCompressOffset = 4.0 / 29;

// Linear sRGB to XYZ, each row divided by the white point D65, so that white is (1, 1, 1).
constexpr double kXr = 0.412453 / 0.95047, kXg = 0.357580 / 0.95047, kXb = 0.180423 / 0.95047;
constexpr double kYr = 0.212671, kYg = 0.715160, kYb = 0.072169;
constexpr double kZr = 0.019334 / 1.08883, kZg = 0.119193 / 1.08883, kZb = 0.950227 / 1.08883;

template <class A>
struct Triple {
  A first, second, third;
};

// A function's value and derivative at one point. The compiler removes the unused one.
template <class A>
struct Point {
  A value, slope;
};

template <class Curves, class A>
ARR_COC_INLINE A luma_of(A r, A g, A b) {
  // The same multiply-add wherever this is inlined, because a constant image must have a gradient of exactly 0.
  return Curves::multiply_add(A(kLumaR), r, Curves::multiply_add(A(kLumaG), g, A(kLumaB) * b));
}

template <class A>
ARR_COC_INLINE Triple<A> white_relative_xyz(A r, A g, A b) {
  return {A(kXr) * r + A(kXg) * g + A(kXb) * b, A(kYr) * r + A(kYg) * g + A(kYb) * b,
          A(kZr) * r + A(kZg) * g + A(kZb) * b};
}

// f(Y), f(X) - f(Y) and f(Y) - f(Z), of which L, a and b are linear functions.
template <class Curves, class A>
ARR_COC_INLINE Triple<A> opponents_of(A r, A g, A b) {
  const Triple<A> xyz = white_relative_xyz(Curves::linear(r).value, Curves::linear(g).value, Curves::linear(b).value);
  const A fx = Curves::compress(xyz.first).value, fy = Curves::compress(xyz.second).value;
  const A fz = Curves::compress(xyz.third).value;
  return {fy, fx - fy, fy - fz};
}

template <class A>
ARR_COC_INLINE Triple<A> scaled_to_lab(Triple<A> opponents) {
  return {A(116) * opponents.first - A(16), A(500) * opponents.second, A(200) * opponents.third};
}

template <class Curves, class A>
ARR_COC_INLINE Triple<A> lab_of(A r, A g, A b) {
  return scaled_to_lab(opponents_of<Curves>(r, g, b));
}

// The gradient with respect to r, g, b of a scalar whose gradient with respect to L, a, b is `grad`.
template <class Curves, class A>
ARR_COC_INLINE Triple<A> lab_gradient(A r, A g, A b, Triple<A> grad) {
  const Point<A> lr = Curves::linear(r), lg = Curves::linear(g), lb = Curves::linear(b);
  const Triple<A> xyz = white_relative_xyz(lr.value, lg.value, lb.value);
  const A from_a = A(500) * grad.second, from_b = A(200) * grad.third;
  const A x = from_a * Curves::compress(xyz.first).slope;
  const A y = (A(116) * grad.first - from_a + from_b) * Curves::compress(xyz.second).slope;
  const A z = -from_b * Curves::compress(xyz.third).slope;
  return {(A(kXr) * x + A(kYr) * y + A(kZr) * z) * lr.slope, (A(kXg) * x + A(kYg) * y + A(kZg) * z) * lg.slope,
          (A(kXb) * x + A(kYb) * y + A(kZb) * z) * lb.slope};
}

// Approximates x^(-1/n) for x > 0 within 3.5 %: the bits of a floating number, read as an integer, are nearly linear in
// its logarithm, and 0.05 centres the error.
template <int n>
ARR_COC_INLINE float inverse_root_guess(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = int32_t(float((127 - 0.05) * (1 + 1.0 / n) * (1 << 23)) - float(bits) * float(1.0 / n));
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

template <int n>
ARR_COC_INLINE double inverse_root_guess(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t high = int32_t(bits >> 32);  // sign, exponent and 20 bits, which are enough and faster to convert
  bits = int64_t(int32_t((1023 - 0.05) * (1 + 1.0 / n) * (1 << 20) - high * (1.0 / n))) << 32;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

// x^(-1/n) for x > 0. With h = 1 - x r^n the root is r (1 - h)^(-1/n). Each step uses this series up to h^3, which
// turns an error e into about n^3 e^4: 4e-2, 5e-5, 1e-15. For float, callers do the last step on their result. Without
// tables and branches the compiler can vectorise this; it cannot vectorise a call of pow.
template <int n, class A>
ARR_COC_INLINE A inverse_root(A x) {
  constexpr double c1 = 1.0 / n, c2 = c1 * (1 + c1) / 2, c3 = c2 * (2 + c1) / 3;
  A r = inverse_root_guess<n>(x);
  for (int step = 0; step < (sizeof(A) == sizeof(double) ? 2 : 1); ++step) {
    const A r2 = r * r, h = A(1) - (n == 5 ? x * r2 * r2 * r : x * r2 * r);
    r += r * h * (A(c1) + h * (A(c2) + h * A(c3)));
  }
  return r;
}

template <class A>
struct CpuCurves {
  static ARR_COC_INLINE A multiply_add(A a, A b, A c) { return a * b + c; }

  static ARR_COC_INLINE Point<A> linear(A c) {
    // False for NaN, which the straight piece keeps, and for infinity, which the series would turn into NaN.
    const bool curved = (c > A(kLinearKnee)) & (c < A(INFINITY));
    const A base = ((curved ? c : A(1)) + A(0.055)) * A(1 / 1.055);
    const A r = inverse_root<5>(base), root = base * (r * r) * (r * r);
    const A h = A(1) - root * r;
    // base^1.4 = base (base^(1/5))^2, and root^2 is off by the factor (1 - h)^(8/5).
    const A power = base * root * root * (A(1) + h * (A(1.6) + h * A(2.08)));
    return {curved ? base * power : c * A(kLinearSlope), curved ? A(2.4 / 1.055) * power : A(kLinearSlope)};
  }

  static ARR_COC_INLINE Point<A> compress(A t) {
    const bool curved = (t > A(kCompressKnee)) & (t < A(INFINITY));
    const A base = curved ? t : A(1);
    const A r = inverse_root<3>(base), root = base * r * r;
    const A h = A(1) - root * r, correction = h * (A(2.0 / 3) + h * A(5.0 / 9));  // (1 - h)^(-2/3) - 1
    // The slope keeps NaN, and is 0 at infinity.
    const A above = curved ? (r * r + r * r * correction) * A(1.0 / 3) : A(0);
    const A slope = t > A(kCompressKnee) ? above : t <= A(kCompressKnee) ? A(kCompressSlope) : t;
    return {curved ? root + root * correction : A(kCompressSlope) * t + A(kCompressOffset), slope};
  }
};

}  // namespace arr_coc
