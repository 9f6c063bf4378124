#include "package/digests.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace exportkit {
namespace {

constexpr size_t kBlock = 64;

constexpr std::array<uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// For machines without OpenSSL.
void compress_portable(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += kBlock) {
    std::array<uint32_t, 64> words;
    for (size_t i = 0; i < 16; ++i) {
      std::memcpy(&words[i], data + 4 * i, 4);
      words[i] = __builtin_bswap32(words[i]);
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t far = words[i - 15], near = words[i - 2];
      words[i] = words[i - 16] + (std::rotr(far, 7) ^ std::rotr(far, 18) ^ far >> 3) + words[i - 7] +
                 (std::rotr(near, 17) ^ std::rotr(near, 19) ^ near >> 10);
    }
    std::array<uint32_t, 8> now;
    std::copy_n(state, 8, now.begin());
    auto& [a, b, c, d, e, f, g, h] = now;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t next =
          h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
      const uint32_t sum = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + next, d = c, c = b, b = a, a = next + sum;
    }
    for (size_t i = 0; i < 8; ++i) state[i] += now[i];
  }
}

// OpenSSL uses the CPU's instructions.
struct OpenSslState {  // SHA256_CTX, which has been public since OpenSSL 0.9
  uint32_t state[8], bits[2], block[16];
  unsigned held, digest_size;
};
using OpenSslUpdate = int (*)(OpenSslState*, const void*, size_t);

void compress(uint32_t* state, const uint8_t* data, size_t blocks) {
  static const auto update = [] {
    void* library = open_libcrypto();
    return library == nullptr ? nullptr : reinterpret_cast<OpenSslUpdate>(dlsym(library, "SHA256_Update"));
  }();
  if (update == nullptr) return compress_portable(state, data, blocks);
  OpenSslState openssl{};
  std::copy_n(state, 8, openssl.state);
  openssl.digest_size = 32;
  update(&openssl, data, blocks * kBlock);  // whole blocks: nothing is held back
  std::copy_n(openssl.state, 8, state);
}

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

#endif

}  // namespace

void* open_libcrypto() {
  // Some wheels bring another OpenSSL under another name. With RTLD_DEEPBIND, libcrypto calls its own functions and not
  // that one's, which would crash. Sanitizers end a process that uses this flag.
  const bool sanitized = dlsym(RTLD_DEFAULT, "__asan_init") != nullptr || dlsym(RTLD_DEFAULT, "__tsan_init") != nullptr;
  return dlopen(kLibcrypto, RTLD_NOW | RTLD_LOCAL | (sanitized ? 0 : RTLD_DEEPBIND));
}

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

uint32_t crc32(uint32_t before, const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t state = ~before;
#if defined(__x86_64__)
  static const bool can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (size >= 64 && can_fold) {
    const size_t folded = size / 16 * 16;
    state = crc32_by_folding(state, bytes, folded);
    bytes += folded;
    size -= folded;
  }
#elif defined(__aarch64__)
  static const bool has_crc32 = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
  if (has_crc32) {
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
