#include "package/fat_binary.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "package/targets.h"
#include "package/text.h"

namespace exportkit {
namespace {

using Version = std::pair<int, int>;

constexpr std::string_view kMagic = "\x50\xed\x55\xba";
constexpr uint16_t kVersion = 1, kPtx = 1, kCode = 2;
constexpr size_t kHeader = 16, kEntry = 48;  // bytes; an entry's header may be longer, but only these are read
constexpr uint64_t kSpecific = 0x100000, kFamily = 0x200000;  // flags

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

std::string text(const Version& version) { return concat(version.first, ".", version.second); }

std::string architecture(uint32_t number, uint64_t flags) {
  return "sm_" + std::to_string(number) + (flags & kSpecific ? "a" : flags & kFamily ? "f" : "");
}

// Adds the entries of one fat binary: a header, then entries, each with a header of its own.
void add_entries(std::string_view binary, std::vector<FatEntry>& found) {
  for (size_t place = 0; binary.size() - place >= kEntry;) {
    const uint16_t kind = at<uint16_t>(binary, place);
    const uint32_t header = at<uint32_t>(binary, place + 4);
    const uint64_t size = at<uint64_t>(binary, place + 8);
    if ((kind != kPtx && kind != kCode) || header < kEntry || size > binary.size() - place) break;
    const Version ptx{at<uint16_t>(binary, place + 26), at<uint16_t>(binary, place + 24)};
    found.push_back({architecture(at<uint32_t>(binary, place + 28), at<uint64_t>(binary, place + 40)),
                     kind == kPtx ? ptx : Version{}});
    if (header > binary.size() - place - size) break;
    place += header + size;
  }
}

}  // namespace

std::vector<FatEntry> fat_entries(std::string_view code) {
  std::vector<FatEntry> found;
  for (size_t start = code.find(kMagic); start != std::string_view::npos; start = code.find(kMagic, start + 1)) {
    if (code.size() - start < kHeader || at<uint16_t>(code, start + 4) != kVersion) continue;
    const uint16_t header = at<uint16_t>(code, start + 6);
    const std::string_view rest = code.substr(std::min(start + header, code.size()));
    add_entries(rest.substr(0, at<uint64_t>(code, start + 8)), found);
  }
  return found;
}

std::optional<Version> newest_ptx(std::string_view code) {
  Version newest;
  for (const FatEntry& entry : fat_entries(code)) newest = std::max(newest, entry.ptx);
  return newest == Version{} ? std::nullopt : std::optional(newest);
}

std::optional<std::string> ptx_rejection(const Version& ptx, const std::string& driver) {
  const Version needed = cuda_of(ptx);
  if (needed <= minor_version(driver)) return std::nullopt;
  return "it has no machine code for this GPU, and the driver cannot compile its PTX " + text(ptx) +
         ", which needs a " + "driver for CUDA " + text(needed) + ": this one supports CUDA " + driver;
}

}  // namespace exportkit
