// Eight float16 numbers to float and back at once, by instructions that GCC does not use in vectorised loops.
#pragma once

#include <torch/headeronly/util/Half.h>

#include "arr_coc/common/cpu.h"

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

#ifdef ARR_COC_HALF_VECTORS
namespace arr_coc {

#if defined(__x86_64__)

inline bool has_half_vectors() { return __builtin_cpu_supports("f16c"); }

ARR_COC_HALF_TARGET ARR_COC_INLINE void widen_eight(const torch::headeronly::Half* in, float* out) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))));
}

ARR_COC_HALF_TARGET ARR_COC_INLINE void narrow_eight(const float* in, torch::headeronly::Half* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(_mm256_loadu_ps(in), 0));
}

// In one piece: two halves would be slow to read back.
ARR_COC_HALF_TARGET ARR_COC_INLINE void copy_eight(const float* in, float* out) {
  _mm256_storeu_ps(out, _mm256_loadu_ps(in));
}

#else

constexpr bool has_half_vectors() { return true; }  // NEON

ARR_COC_INLINE void widen_eight(const torch::headeronly::Half* in, float* out) {
  const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(in)));
  vst1q_f32(out, vcvt_f32_f16(vget_low_f16(eight)));
  vst1q_f32(out + 4, vcvt_high_f32_f16(eight));
}

ARR_COC_INLINE void narrow_eight(const float* in, torch::headeronly::Half* out) {
  const float16x8_t eight = vcvt_high_f16_f32(vcvt_f16_f32(vld1q_f32(in)), vld1q_f32(in + 4));
  vst1q_u16(reinterpret_cast<uint16_t*>(out), vreinterpretq_u16_f16(eight));
}

ARR_COC_INLINE void copy_eight(const float* in, float* out) {
  vst1q_f32(out, vld1q_f32(in));
  vst1q_f32(out + 4, vld1q_f32(in + 4));
}

#endif

}  // namespace arr_coc
#endif
