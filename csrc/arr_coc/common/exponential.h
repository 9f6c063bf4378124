// The exponential function without a call, a table or a branch, so that loops with it vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#include "arr_coc/common/cpu.h"

namespace arr_coc {

template <class A>
struct Exponential;

// e^r = 1 + r + r^2 P(r) for |r| <= ln 2 / 2: minimax in relative error, 3e-9 for float and 4e-18 for double. ln 2
// comes in two pieces, the first short enough for its product with any exponent to be exact.
template <>
struct Exponential<float> {
  using Bits = uint32_t;
  static constexpr int mantissa_bits = 23, bias = 127;
  static constexpr float least = -104, greatest = 89, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static ARR_COC_INLINE float polynomial(float r) {
    return 0.49999994f + r * (0.16666521f + r * (0.04166839f + r * (0.008368724f + r * 0.0013814584f)));
  }
  static ARR_COC_INLINE float fraction(float f) {
    return 0.69314724f +
           f * (0.24022652f + f * (0.055503104f + f * (0.009617693f + f * (0.0013406643f + f * 0.00015594676f))));
  }
};
template <>
struct Exponential<double> {
  using Bits = uint64_t;
  static constexpr int mantissa_bits = 52, bias = 1023;
  static constexpr double least = -746, greatest = 710, ln2_high = 6.93145751953125e-1,
                          ln2_low = 1.42860682030941723212e-6;
  static ARR_COC_INLINE double polynomial(double r) {
    const double high =
        2.4801493061514992e-05 + r * (2.75575864883153e-06 + r * (2.7630262879584173e-07 + r * 2.5000048594441956e-08));
    return 0.5000000000000011 +
           r * (0.16666666666666413 +
                r * (0.04166666666653005 + r * (0.008333333333494593 + r * (0.0013888888943662627 +
                                                                            r * (0.00019841269506370171 + r * high)))));
  }
  static ARR_COC_INLINE double fraction(double f) {
    const double high = 1.5252727385162077e-05 +
                        f * (1.3215442675106784e-06 +
                             f * (1.0180647670584795e-07 + f * (7.072570455664346e-09 + f * 4.0780704733827083e-10)));
    const double middle = 0.009618129107607003 + f * (0.0013333558153440003 + f * (0.0001540353044157249 + f * high));
    return 0.6931471805599457 + f * (0.24022650695910097 + f * (0.05550410866479039 + f * middle));
  }
};

// e^x to 1 ulp. NaN stays, overflow is infinity, and underflow goes through denormals to 0.
template <class A>
ARR_COC_INLINE A exponential(A x) {
  using E = Exponential<A>;
  using Bits = typename E::Bits;
  // After adding this, a number's last mantissa bit is worth 1, which rounds the number. If the bias is added too, the
  // low bits are an exponent's.
  constexpr A shift = A(3) * A(Bits(1) << (E::mantissa_bits - 1)), biased = shift + A(E::bias);
  x = x < E::least ? E::least : x;
  x = x > E::greatest ? E::greatest : x;
  const A n = (x * A(1.4426950408889634074) + shift) - shift;
  const A r = (x - n * E::ln2_high) - n * E::ln2_low;
  const A power = A(1) + (r + r * r * E::polynomial(r));
  // 2^n in two factors, because 2^n alone may not be a normal number although the result is one.
  const A half = n * A(0.5) + biased, rest = (n - (half - biased)) + biased;
  const auto two_to = [](A exponent) {
    Bits bits;
    std::memcpy(&bits, &exponent, sizeof bits);
    bits <<= E::mantissa_bits;
    std::memcpy(&exponent, &bits, sizeof bits);
    return exponent;
  };
  return power * two_to(half) * two_to(rest);
}

// Below this, power_of_two returns 0.
template <class A>
constexpr A kLeastPower = 1 - Exponential<A>::bias;

// 2^x for x of at most 127 (1023 in double) to 1.3 ulp, in half the steps of `exponential`. NaN stays, and results
// below the normal numbers are 0. It is for softmaxes, whose arguments are at most 0: e^(x - max) is 2^(x log2 e - max
// log2 e).
template <class A>
ARR_COC_INLINE A power_of_two(A x) {
  using E = Exponential<A>;
  using Bits = typename E::Bits;
  constexpr A biased = A(3) * A(Bits(1) << (E::mantissa_bits - 1)) + A(E::bias);
  const A inside = x < kLeastPower<A> ? kLeastPower<A> : x;
  A scale = inside + biased;
  const A f = inside - (scale - biased);
  Bits bits;
  std::memcpy(&bits, &scale, sizeof bits);
  bits <<= E::mantissa_bits;
  std::memcpy(&scale, &bits, sizeof bits);
  const A power = scale + scale * (f * E::fraction(f));
  return x < kLeastPower<A> ? A(0) : power;
}

}  // namespace arr_coc
