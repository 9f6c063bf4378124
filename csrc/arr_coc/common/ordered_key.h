// Maps floating-point numbers to integers with the order of a ranking.
#pragma once

#include <torch/headeronly/macros/Macros.h>

#include <cstdint>
#include <cstring>

#include "arr_coc/common/dispatch.h"

namespace arr_coc {

// `type` holds the key, which uses the lowest `bits` bits. `raw` has the number's width, `infinity` is its bit pattern.
template <class T>
struct OrderedKey;
template <>
struct OrderedKey<float> {
  using type = uint32_t;
  using raw = uint32_t;
  static constexpr int bits = 32;
  static constexpr raw infinity = 0x7f800000u;
};
template <>
struct OrderedKey<double> {
  using type = uint64_t;
  using raw = uint64_t;
  static constexpr int bits = 64;
  static constexpr raw infinity = 0x7ff0000000000000ull;
};
template <>
struct OrderedKey<Half> {
  using type = uint32_t;
  using raw = uint16_t;
  static constexpr int bits = 16;
  static constexpr raw infinity = 0x7c00u;
};
template <>
struct OrderedKey<BFloat16> {
  using type = uint32_t;
  using raw = uint16_t;
  static constexpr int bits = 16;
  static constexpr raw infinity = 0x7f80u;
};

template <class T>
using ordered_key_t = typename OrderedKey<T>::type;

// Keys ascend as numbers descend: key(a) < key(b) if a ranks before b. -0 equals +0. Every NaN has the last key, which
// no number has, because its pattern before the complement is a NaN's.
template <class T>
C10_HOST_DEVICE inline ordered_key_t<T> descending_key(T value) {
  using Key = ordered_key_t<T>;
  constexpr Key sign = Key(1) << (OrderedKey<T>::bits - 1), all = sign | (sign - 1);
  typename OrderedKey<T>::raw raw;
  std::memcpy(&raw, &value, sizeof(raw));
  const Key magnitude = Key(raw) & ~sign;
  if (magnitude > OrderedKey<T>::infinity) return all;
  if (magnitude == 0) return sign - 1;
  // Ascending would be ~raw for negative numbers and raw | sign for the others; this is its complement.
  return (Key(raw) & sign) ? Key(raw) : Key(raw) ^ (sign - 1);
}

}  // namespace arr_coc
