// float16 and bfloat16 to float and back on the CPU: rounded to nearest even, infinities, denormals and NaN kept.
//
// load and store convert one number without a branch, so that loops with them vectorise on every processor. widen and
// narrow convert a row with the processor's instructions, which GCC does not use in vectorised loops. If converting
// float16 limits a loop, convert a block that fits the first cache, then compute on that.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "arr_coc/common/cpu.h"
#include "arr_coc/common/stream.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
// Marks a function that uses these instructions. Call it only if has_half_vectors(). Its short loops would differ by a
// tenth with the place that the linker gives them.
#define ARR_COC_HALF_TARGET __attribute__((target("avx,f16c")))
#define ARR_COC_HALF_VECTORS __attribute__((target("avx,f16c"), aligned(64)))
#elif defined(__aarch64__)
#include <arm_neon.h>
#define ARR_COC_HALF_TARGET
#define ARR_COC_HALF_VECTORS __attribute__((aligned(64)))
#endif

namespace arr_coc {

// --- eight float16 numbers at once, by instructions that GCC does not use in vectorised loops ---

#ifdef ARR_COC_HALF_VECTORS
#if defined(__x86_64__)

inline bool has_half_vectors() { return __builtin_cpu_supports("f16c"); }

ARR_COC_HALF_TARGET ARR_COC_INLINE void widen_eight(const Half* in, float* out) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))));
}

ARR_COC_HALF_TARGET ARR_COC_INLINE void narrow_eight(const float* in, Half* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(_mm256_loadu_ps(in), 0));
}

// In one piece: two halves would be slow to read back.
ARR_COC_HALF_TARGET ARR_COC_INLINE void copy_eight(const float* in, float* out) {
  _mm256_storeu_ps(out, _mm256_loadu_ps(in));
}

#else

constexpr bool has_half_vectors() { return true; }  // NEON

ARR_COC_INLINE void widen_eight(const Half* in, float* out) {
  const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(in)));
  vst1q_f32(out, vcvt_f32_f16(vget_low_f16(eight)));
  vst1q_f32(out + 4, vcvt_high_f32_f16(eight));
}

ARR_COC_INLINE void narrow_eight(const float* in, Half* out) {
  const float16x8_t eight = vcvt_high_f16_f32(vcvt_f16_f32(vld1q_f32(in)), vld1q_f32(in + 4));
  vst1q_u16(reinterpret_cast<uint16_t*>(out), vreinterpretq_u16_f16(eight));
}

ARR_COC_INLINE void copy_eight(const float* in, float* out) {
  vst1q_f32(out, vld1q_f32(in));
  vst1q_f32(out + 4, vld1q_f32(in + 4));
}

#endif
#endif

// --- single numbers and rows ---

ARR_COC_INLINE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

ARR_COC_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

ARR_COC_INLINE float load(float value) { return value; }
ARR_COC_INLINE double load(double value) { return value; }
ARR_COC_INLINE float load(BFloat16 value) { return float_of_bits(uint32_t(value.x) << 16); }
ARR_COC_INLINE float load(Half value) {
  constexpr uint32_t rebias = (127 - 15) << 23;
  const uint32_t magnitude = value.x & 0x7fffu, sign = uint32_t(value.x & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + rebias;
  // A denormal's bits, as the last ones of a number from 0.5 on.
  const uint32_t denormal = bits_of_float(float_of_bits(0x3f000000u | magnitude) - 0.5f);
  const uint32_t finite = magnitude < 0x0400u ? denormal : normal;
  return float_of_bits((magnitude < 0x7c00u ? finite : normal + rebias) | sign);
}

template <class T, class A>
ARR_COC_INLINE T store(A value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return BFloat16(uint16_t(value == value ? rounded : 0x7fc0u), BFloat16::from_bits());
  } else if constexpr (std::is_same_v<T, Half>) {
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // The addition rounds to what a denormal's last bit is worth.
    const uint32_t denormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t small = magnitude < (113u << 23) ? denormal : normal;
    const uint32_t finite = magnitude < 0x477ff000u ? small : 0x7c00u;
    return Half(uint16_t((magnitude <= 0x7f800000u ? finite : 0x7e00u) | sign), Half::from_bits());
  } else {
    return T(value);
  }
}

template <class T, class A>
ARR_COC_EVERY_ISA void widen(const T* in, A* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) out[i] = A(load(in[i]));
}

template <class T, class A>
ARR_COC_EVERY_ISA void narrow(const A* in, T* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) out[i] = store<T>(in[i]);
}

#ifdef ARR_COC_HALF_VECTORS
// These return how many of a row's first numbers they converted: all that fill a vector.
ARR_COC_HALF_VECTORS inline int64_t widen_vectors(const Half* in, float* out, int64_t size) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) widen_eight(in + i, out + i);
  return i;
}

ARR_COC_HALF_VECTORS inline int64_t narrow_vectors(const float* in, Half* out, int64_t size) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) narrow_eight(in + i, out + i);
  return i;
}

inline void widen(const Half* in, float* out, int64_t size) {
  const int64_t done = has_half_vectors() ? widen_vectors(in, out, size) : 0;
  if (done < size) widen<Half, float>(in + done, out + done, size - done);
}

inline void narrow(const float* in, Half* out, int64_t size) {
  const int64_t done = has_half_vectors() ? narrow_vectors(in, out, size) : 0;
  if (done < size) narrow<Half, float>(in + done, out + done, size - done);
}
#endif

// Returns the row in the computing dtype: itself, or a copy in `buffer`.
template <class T, class A>
const A* accumulated(const T* row, int64_t width, A* buffer) {
  if constexpr (std::is_same_v<T, A>) {
    return row;
  } else {
    widen(row, buffer, width);
    return buffer;
  }
}

template <class T, class A>
const A* accumulated(const T* row, int64_t width, std::vector<A>& buffer) {
  if constexpr (!std::is_same_v<T, A>) buffer.resize(width);
  return accumulated(row, width, buffer.data());
}

// Memory for a row before it is stored: the row itself, or a buffer of the computing dtype.
template <class T>
class StagedRow {
 public:
  using A = accumulate_t<T>;
  // `bytes`: all bytes that the operator writes, if rows may bypass the caches.
  explicit StagedRow(int64_t width, int64_t bytes = 0)
      : stream_(bytes), width_(width), buffer_(kCopies || stream_.past_caches() ? width : 0) {}

  A* at(T* row) {
    if constexpr (kCopies)
      return buffer_.data();
    else
      return buffer_.empty() ? row : buffer_.data();
  }

  void store_to(T* row) {
    if constexpr (kCopies)
      narrow(buffer_.data(), row, width_);
    else if (!buffer_.empty())
      stream_.copy(buffer_.data(), width_, row);
  }

 private:
  static constexpr bool kCopies = !std::is_same_v<T, A>;
  RowStream stream_;
  int64_t width_;
  std::vector<A> buffer_;
};

}  // namespace arr_coc
