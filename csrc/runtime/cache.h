// What is unpacked from packages, once for all processes: the twin of exportkit/runtime/cache/entries.py, in the same
// folders. exportkit/runtime/cache has the layout and the rules.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "runtime/package/atomic.h"
#include "runtime/package/reader.h"

namespace exportkit {

// An unpacked entry that is in use: `exportkit cache prune` leaves it alone as long as this lives.
class CacheEntry {
 public:
  CacheEntry(std::filesystem::path folder, Descriptor locked)
      : folder_(std::move(folder)), locked_(std::move(locked)) {}

  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
  Descriptor locked_;
};

struct Unpacking {
  bool again = false;  // whether to hash files that count as verified
  // Is told why the cache cannot be used, where that is so: a temporary directory takes its place.
  std::function<void(const std::string&)> warn;
};

// An operator library, the only file of its entry; a target's files. The error of the record that does not hold;
// CacheError where there is no room for it.
CacheEntry unpack(const PackageReader& reader, const Library& library, const Unpacking& how);
CacheEntry unpack(const PackageReader& reader, const Target& target, const Unpacking& how);

}  // namespace exportkit
