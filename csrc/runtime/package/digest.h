// SHA-256 and CRC-32.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace exportkit {

// SHA-256 of what it is given, a piece at a time.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void update(const void* data, size_t size);
  // 64 lower-case hexadecimal digits. What it was given is forgotten.
  std::string hex();

 private:
  evp_md_ctx_st* context_;
};

std::string sha256_hex(std::string_view data);

// The CRC-32 of zip archives. `before` is that of what precedes `data`.
uint32_t crc32(uint32_t before, const void* data, size_t size);

}  // namespace exportkit
