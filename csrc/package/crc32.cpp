#include "package/crc32.h"

#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>

#include <cstring>
#endif

namespace exportkit {

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // reflected

constexpr std::array<uint32_t, 256> kTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? kPolynomial : 0);
  }
  return table;
}();

#if defined(__x86_64__)

// Folding with carry-less multiplication: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel, 2009, with its constants for this polynomial. `size` is a multiple of 16, and at
// least 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t crc32_by_folding(uint32_t state, const uint8_t* data, size_t size) {
  const auto load = [](const uint8_t* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  const auto fold = [](__m128i value, __m128i constants, __m128i next) __attribute__((target("pclmul,sse4.1"))) {
    const __m128i low = _mm_clmulepi64_si128(value, constants, 0x00);
    const __m128i high = _mm_clmulepi64_si128(value, constants, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
  };
  const __m128i by_512 = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4);  // x^(512-32), x^(512+32)
  const __m128i by_128 = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
  __m128i lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = load(data + 16 * i);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) lanes[i] = fold(lanes[i], by_512, load(data + 16 * i));
  }
  __m128i value = lanes[0];
  for (int i = 1; i < 4; ++i) value = fold(value, by_128, lanes[i]);
  for (; size > 0; data += 16, size -= 16) value = fold(value, by_128, load(data));

  const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);
  value = _mm_xor_si128(_mm_srli_si128(value, 8), _mm_clmulepi64_si128(value, by_128, 0x10));
  const __m128i by_64 = _mm_set_epi64x(0, 0x0163CD6124);
  value = _mm_xor_si128(_mm_srli_si128(value, 4), _mm_clmulepi64_si128(_mm_and_si128(value, low32), by_64, 0x00));
  // Barrett reduction, to 32 bits.
  const __m128i barrett = _mm_set_epi64x(0x01F7011641, 0x01DB710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(value, low32), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low32), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(value, quotient), 1));
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#elif defined(__aarch64__)

// The CPU's instruction is for this very polynomial. `state` is the complement of a CRC-32; `size` is a multiple of 8.
__attribute__((target("+crc"))) uint32_t crc32_by_instruction(uint32_t state, const uint8_t* data, size_t size) {
  for (; size > 0; data += 8, size -= 8) {
    uint64_t eight;
    std::memcpy(&eight, data, sizeof eight);
    state = __crc32d(state, eight);
  }
  return state;
}

bool has_crc32() {
  static const bool has = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
  return has;
}

#endif

}  // namespace

uint32_t crc32(uint32_t before, const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t state = ~before;
#if defined(__x86_64__)
  if (size >= 64 && can_fold()) {
    const size_t folded = size / 16 * 16;
    state = crc32_by_folding(state, bytes, folded);
    bytes += folded;
    size -= folded;
  }
#elif defined(__aarch64__)
  if (has_crc32()) {
    const size_t whole = size / 8 * 8;
    state = crc32_by_instruction(state, bytes, whole);
    bytes += whole;
    size -= whole;
  }
#endif
  for (; size > 0; ++bytes, --size) state = state >> 8 ^ kTable[(state ^ *bytes) & 0xFF];
  return ~state;
}

}  // namespace exportkit
