// SHA-256, FIPS 180-4.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace exportkit {

// SHA-256 of what it is given, a piece at a time.
class Sha256 {
 public:
  Sha256();

  void update(const void* data, size_t size);
  // 64 lower-case hexadecimal digits. What it was given is forgotten.
  std::string hex();

 private:
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> block_;  // what is no whole block yet
  uint64_t size_;
};

std::string sha256_hex(std::string_view data);

}  // namespace exportkit
