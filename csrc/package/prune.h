// Lists and prunes the cache while models may be running. exportkit/runtime/cache has the layout.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace exportkit {

// Something in the cache, or a leftover.
struct CacheItem {
  // "library" or "target" (unpacked), "compiled" (by an export), "package" (its record), or "leftover" of a killed
  // process
  std::string kind;
  std::filesystem::path path;
  int64_t size;  // in bytes
  double used;   // the time of the last use, in seconds since 1970
  bool in_use;   // whether a process uses or writes it now
  bool removed = false;
};

// What to remove besides leftovers. Items in use always stay.
struct PruneLimits {
  // Removes the least recently used items until at most this many bytes are left. Records of packages stay: they are
  // small, and without its record a large package is hashed again.
  std::optional<int64_t> max_bytes;
  std::optional<double> unused_for;  // removes items that were not used for this many seconds
  bool everything = false;
  std::string kind;  // of the only items that count and that are removed; empty: all
};

// Lists the cache, and leftovers in a directory for temporary files, least recently used first. With limits, removes
// the items that exceed them. Creates nothing, follows no links, and ignores names that the cache does not use.
// CacheError: another user can change the cache; nothing was removed.
std::vector<CacheItem> cache_items(const std::filesystem::path& temporary,
                                   const std::optional<PruneLimits>& limits = {});

}  // namespace exportkit
