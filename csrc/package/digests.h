// The digests of records: SHA-256, FIPS 180-4, and the CRC-32 of zip archives.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace exportkit {

// Computes SHA-256 of data given in pieces.
class Sha256 {
 public:
  Sha256();

  void update(const void* data, size_t size);
  // The digest in 64 lower-case hexadecimal digits. Starts again from empty data.
  std::string hex();

 private:
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> block_;  // data of an incomplete block
  uint64_t size_;
};

std::string sha256_hex(std::string_view data);

// OpenSSL 3, which stays open; null without one, and dlerror() says why. The build does not need it, and digests can do
// without it.
inline constexpr const char* kLibcrypto = "libcrypto.so.3";
void* open_libcrypto();

// The CRC-32 of zip archives. To go on from earlier data, pass its CRC-32 as `before`; pass 0 to begin.
uint32_t crc32(uint32_t before, const void* data, size_t size);

}  // namespace exportkit
