// What the cache holds, and how it is kept small, beside running models. exportkit/runtime/cache has the layout.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace exportkit {

// Something that is kept, or left over.
struct CacheItem {
  std::string kind;  // an unpacked library or target; the record of a package; the leftover of a killed process
  std::filesystem::path path;
  int64_t size;  // in bytes
  double used;   // when it was last used, in seconds since 1970
  bool in_use;   // whether a process uses it now, or writes it
  bool removed = false;
};

// What is to go, beside what is left over. What is in use stays.
struct PruneLimits {
  // What was used least recently goes until no more bytes are left. Records of packages stay: they take no room, and
  // without one a large package is hashed again.
  std::optional<int64_t> max_bytes;
  std::optional<double> unused_for;  // seconds
  bool everything = false;
};

// What is in the cache, and what was left in a directory for temporary files; what was used least recently comes first.
// Where there are limits, what goes beyond them is removed. Nothing is made, no link is followed, and what has another
// name than the cache gives is left alone. CacheError: another user could change the cache, and nothing was removed.
std::vector<CacheItem> cache_items(const std::filesystem::path& temporary,
                                   const std::optional<PruneLimits>& limits = {});

}  // namespace exportkit
