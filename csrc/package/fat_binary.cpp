#include "package/fat_binary.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "package/targets.h"

namespace exportkit {
namespace {

using Version = std::pair<int, int>;

constexpr std::string_view kMagic = "\x50\xed\x55\xba";
constexpr uint16_t kVersion = 1, kPtx = 1, kCode = 2;
constexpr size_t kHeader = 16, kEntry = 32;  // bytes; an entry's header is longer, but only these are read

template <class T>
T at(std::string_view code, size_t place) {
  T value;
  std::memcpy(&value, code.data() + place, sizeof value);
  return value;
}

// The CUDA that brought a version of PTX. 9.x came with 13.x and 7.x with 11.x; of 8.x, 12.6 brought none.
Version cuda_of(const Version& ptx) {
  const auto [major, minor] = ptx;
  return {major + 4, major == 8 && minor > 5 ? minor + 1 : minor};
}

std::string text(const Version& version) {
  return std::to_string(version.first) + "." + std::to_string(version.second);
}

// The newest PTX of one fat binary: a header, then entries, each with a header of its own.
std::optional<Version> newest_of(std::string_view binary) {
  std::optional<Version> newest;
  for (size_t place = 0; place + kEntry <= binary.size();) {
    const uint16_t kind = at<uint16_t>(binary, place);
    const uint32_t header = at<uint32_t>(binary, place + 4);
    const uint64_t size = at<uint64_t>(binary, place + 8);
    if ((kind != kPtx && kind != kCode) || header < kEntry || size > binary.size() - place) break;
    if (kind == kPtx) {
      newest = std::max(newest.value_or(Version{0, 0}),
                        Version{at<uint16_t>(binary, place + 26), at<uint16_t>(binary, place + 24)});
    }
    place += header + size;
  }
  return newest;
}

}  // namespace

std::optional<Version> newest_ptx(std::string_view code) {
  std::optional<Version> newest;
  for (size_t start = code.find(kMagic); start != std::string_view::npos; start = code.find(kMagic, start + 1)) {
    if (code.size() - start < kHeader || at<uint16_t>(code, start + 4) != kVersion) continue;
    const uint16_t header = at<uint16_t>(code, start + 6);
    const std::string_view rest = code.substr(std::min(start + header, code.size()));
    const auto found = newest_of(rest.substr(0, at<uint64_t>(code, start + 8)));
    if (found && (!newest || *newest < *found)) newest = found;
  }
  return newest;
}

std::optional<std::string> ptx_rejection(const Version& ptx, const std::string& driver) {
  const Version needed = cuda_of(ptx);
  if (needed <= minor_version(driver)) return std::nullopt;
  return "it has no machine code for this GPU, and the driver cannot compile its PTX " + text(ptx) +
         ", which needs a " + "driver for CUDA " + text(needed) + ": this one supports CUDA " + driver;
}

}  // namespace exportkit
