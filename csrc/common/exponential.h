// The exponential function without a call, a table or a branch, so that the compiler vectorises the loop it stands in.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu.h"

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
};

// e^x to 1 ulp; NaN stays, overflow is infinity, and what underflows goes through the denormals to 0.
template <class A>
ARR_COC_INLINE A exponential(A x) {
  using E = Exponential<A>;
  using Bits = typename E::Bits;
  // A number's last mantissa bit is worth 1 after this is added to it: that rounds it, and where the bias is part of
  // what is added, the low bits are those of an exponent.
  constexpr A shift = A(3) * A(Bits(1) << (E::mantissa_bits - 1)), biased = shift + A(E::bias);
  x = x < E::least ? E::least : x;
  x = x > E::greatest ? E::greatest : x;
  const A n = (x * A(1.4426950408889634074) + shift) - shift;
  const A r = (x - n * E::ln2_high) - n * E::ln2_low;
  const A power = A(1) + (r + r * r * E::polynomial(r));
  // 2^n in two factors, since 2^n alone may be no normal number where the result is one.
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

}  // namespace arr_coc
