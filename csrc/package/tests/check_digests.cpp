// SHA-256 and CRC-32 of a file: in one piece, in two pieces cut anywhere, and by OpenSSL as by the portable loop.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "package/digests.cpp"

using namespace exportkit;

namespace {

std::string sha256_in_pieces(const std::string& content, size_t cut) {
  Sha256 digest;
  digest.update(content.data(), cut);
  digest.update(content.data() + cut, content.size() - cut);
  return digest.hex();
}

uint32_t crc32_in_pieces(const std::string& content, size_t cut) {
  return crc32(crc32(0, content.data(), cut), content.data() + cut, content.size() - cut);
}

// Whether OpenSSL, if it is here, agrees with the portable loop, from any state and for any number of blocks.
bool openssl_agrees() {
  std::mt19937 random(0);
  for (size_t blocks = 0; blocks < 40; ++blocks) {
    std::vector<uint8_t> data(blocks * kBlock);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
    std::array<uint32_t, 8> one{}, other{};
    for (size_t i = 0; i < one.size(); ++i) one[i] = other[i] = random();
    compress(one.data(), data.data(), blocks);
    compress_portable(other.data(), data.data(), blocks);
    if (one != other) return false;
  }
  return true;
}

}  // namespace

int main(int, char** argv) {
  std::ifstream file(argv[1], std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  const std::string sha256 = sha256_hex(content);
  const uint32_t crc = crc32(0, content.data(), content.size());
  for (size_t cut = 0; cut <= content.size(); ++cut) {
    if (sha256_in_pieces(content, cut) != sha256 || crc32_in_pieces(content, cut) != crc) return EXIT_FAILURE;
  }
  if (!openssl_agrees()) return EXIT_FAILURE;
  std::cout << sha256 << " " << crc << "\n";
}
