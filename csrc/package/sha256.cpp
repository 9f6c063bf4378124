#include "package/sha256.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "package/libcrypto.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace exportkit {
namespace {

constexpr size_t kBlock = 64;

constexpr std::array<uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

uint32_t big_endian(const uint8_t* data) {
  uint32_t word;
  std::memcpy(&word, data, sizeof word);
  return __builtin_bswap32(word);
}

#if defined(__x86_64__)
#define EXPORTKIT_CLONES __attribute__((target_clones("arch=haswell", "default")))  // haswell: rorx, andn
#else
#define EXPORTKIT_CLONES
#endif

// Sixteen rounds at a time, with the message schedule in a ring of sixteen words.
EXPORTKIT_CLONES void compress_portable(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += kBlock) {
    uint32_t w[16];
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6],
             h = state[7];
#define EXPORTKIT_ROUND(a, b, c, d, e, f, g, h, k, word)                                                   \
  do {                                                                                                     \
    const uint32_t t =                                                                                     \
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + (k) + (word); \
    d += t;                                                                                                \
    h = t + (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));       \
  } while (0)
#define EXPORTKIT_EIGHT(i, WORD)                                      \
  EXPORTKIT_ROUND(a, b, c, d, e, f, g, h, k[(i) + 0], WORD((i) + 0)); \
  EXPORTKIT_ROUND(h, a, b, c, d, e, f, g, k[(i) + 1], WORD((i) + 1)); \
  EXPORTKIT_ROUND(g, h, a, b, c, d, e, f, k[(i) + 2], WORD((i) + 2)); \
  EXPORTKIT_ROUND(f, g, h, a, b, c, d, e, k[(i) + 3], WORD((i) + 3)); \
  EXPORTKIT_ROUND(e, f, g, h, a, b, c, d, k[(i) + 4], WORD((i) + 4)); \
  EXPORTKIT_ROUND(d, e, f, g, h, a, b, c, k[(i) + 5], WORD((i) + 5)); \
  EXPORTKIT_ROUND(c, d, e, f, g, h, a, b, k[(i) + 6], WORD((i) + 6)); \
  EXPORTKIT_ROUND(b, c, d, e, f, g, h, a, k[(i) + 7], WORD((i) + 7))
    const uint32_t* k = kRounds.data();
    const auto first = [&](size_t i) { return w[i] = big_endian(data + 4 * i); };
    EXPORTKIT_EIGHT(0, first);
    EXPORTKIT_EIGHT(8, first);
    const auto next = [&](size_t i) {
      const uint32_t far = w[(i + 1) & 15], near = w[(i + 14) & 15];
      return w[i & 15] += (std::rotr(far, 7) ^ std::rotr(far, 18) ^ far >> 3) + w[(i + 9) & 15] +
                          (std::rotr(near, 17) ^ std::rotr(near, 19) ^ near >> 10);
    };
    for (k += 16; k < kRounds.data() + 64; k += 16) {
      EXPORTKIT_EIGHT(0, next);
      EXPORTKIT_EIGHT(8, next);
    }
#undef EXPORTKIT_EIGHT
#undef EXPORTKIT_ROUND
    const uint32_t after[8] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += after[i];
  }
}

#if defined(__x86_64__)

// Uses the CPU's SHA instructions, which do two rounds each on the state in the order ABEF and CDGH. Intel, "Intel SHA
// Extensions", 2013.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha(uint32_t* state, const uint8_t* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const auto* words = reinterpret_cast<const __m128i*>(state);
  const __m128i dcba = _mm_loadu_si128(words), hgfe = _mm_loadu_si128(words + 1);
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; blocks > 0; --blocks, data += kBlock) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i message[4];
    for (int i = 0; i < 4; ++i) {
      message[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), swap);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m128i& now = message[i & 3];
      const __m128i rounds = _mm_load_si128(reinterpret_cast<const __m128i*>(kRounds.data()) + i);
      const __m128i sum = _mm_add_epi32(now, rounds);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
      if (i < 12) {  // computes the words used four quads later
        const __m128i next = message[(i + 1) & 3], last = message[(i + 3) & 3];
        const __m128i middle = _mm_alignr_epi8(last, message[(i + 2) & 3], 4);
        now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, next), middle), last);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  auto* out = reinterpret_cast<__m128i*>(state);
  _mm_storeu_si128(out, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(out + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha() {
  uint32_t a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));  // leaf 7: bit 29 of ebx
  return (b >> 29 & 1) != 0 && __builtin_cpu_supports("sse4.1");
}

#elif defined(__aarch64__)

// Uses the CPU's SHA instructions, which do four rounds each on halves of the state. Arm, "Arm Architecture Reference
// Manual for A-profile", C7.2.
__attribute__((target("+crypto"))) void compress_sha(uint32_t* state, const uint8_t* data, size_t blocks) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; blocks > 0; --blocks, data += kBlock) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t message[4];
    for (int i = 0; i < 4; ++i) message[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      uint32x4_t& now = message[i & 3];
      const uint32x4_t sum = vaddq_u32(now, vld1q_u32(kRounds.data() + 4 * i)), abcd_now = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_now, sum);
      if (i < 12) {  // computes the words used four quads later
        now = vsha256su1q_u32(vsha256su0q_u32(now, message[(i + 1) & 3]), message[(i + 2) & 3], message[(i + 3) & 3]);
      }
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

bool has_sha() { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }

#endif

// On a CPU without SHA instructions, OpenSSL's AVX2 code is 1.6 times as fast as the compiled portable code. It is used
// if it is installed.
struct OpenSslState {  // SHA256_CTX, which has been public since OpenSSL 0.9
  uint32_t state[8], bits[2], block[16];
  unsigned held, digest_size;
};
using OpenSslUpdate = int (*)(OpenSslState*, const void*, size_t);

OpenSslUpdate openssl_update() {
  static const auto found = [] {
    void* library = open_libcrypto();
    return library == nullptr ? nullptr : reinterpret_cast<OpenSslUpdate>(dlsym(library, "SHA256_Update"));
  }();
  return found;
}

void compress_openssl(uint32_t* state, const uint8_t* data, size_t blocks) {
  OpenSslState openssl{};
  std::copy_n(state, 8, openssl.state);
  openssl.digest_size = 32;
  openssl_update()(&openssl, data, blocks * kBlock);  // whole blocks: nothing is held back
  std::copy_n(openssl.state, 8, state);
}

Compress choose() {
#if defined(__x86_64__) || defined(__aarch64__)
  if (has_sha()) return compress_sha;
#endif
  return openssl_update() == nullptr ? compress_portable : compress_openssl;
}

void compress(uint32_t* state, const uint8_t* data, size_t blocks) {
  static const Compress chosen = choose();
  chosen(state, data, blocks);
}

}  // namespace

Sha256::Sha256() : state_(kStart), size_(0) {}

void Sha256::update(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t held = size_ % kBlock;
  size_ += size;
  if (held > 0) {
    const size_t taken = std::min(size, kBlock - held);
    std::copy_n(bytes, taken, block_.data() + held);
    if (held + taken < kBlock) return;
    compress(state_.data(), block_.data(), 1);
    bytes += taken;
    size -= taken;
  }
  compress(state_.data(), bytes, size / kBlock);
  std::copy_n(bytes + size / kBlock * kBlock, size % kBlock, block_.data());
}

std::string Sha256::hex() {
  const uint64_t bits = size_ * 8;
  const size_t padding = (kBlock + 55 - size_ % kBlock) % kBlock;  // between the bit 1 and the size
  std::array<uint8_t, 2 * kBlock> tail{0x80};
  for (size_t i = 0; i < 8; ++i) tail[1 + padding + i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(tail.data(), 1 + padding + 8);
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) out += kDigits[word >> shift & 15];
  }
  *this = Sha256();
  return out;
}

std::string sha256_hex(std::string_view data) {
  Sha256 digest;
  digest.update(data.data(), data.size());
  return digest.hex();
}

}  // namespace exportkit
