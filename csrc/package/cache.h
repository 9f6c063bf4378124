// What is unpacked from packages, once for all processes. exportkit/runtime/cache has the layout and the rules.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "package/atomic.h"
#include "package/reader.h"

namespace exportkit {

inline constexpr const char* kEntryRecord = "~verified.json";
inline constexpr const char* kWritersLock = "~lock";

// An unpacked entry that is in use: `exportkit cache prune` leaves it alone as long as this lives.
class CacheEntry {
 public:
  CacheEntry(std::filesystem::path folder, const std::string& library, Descriptor locked)
      : folder_(std::move(folder)), library_(folder_ / library), locked_(std::move(locked)) {}

  const std::filesystem::path& folder() const { return folder_; }
  // The shared library among its files; of a target's, the model's.
  const std::filesystem::path& library() const { return library_; }

 private:
  std::filesystem::path folder_, library_;
  Descriptor locked_;
};

struct Unpacking {
  bool always = false;  // whether to hash files that count as verified
  // Is told why the cache cannot be used, where that is so: a temporary directory takes its place.
  std::function<void(const std::string&)> warn;
};

// An operator library, the only file of its entry; a target's files. The error of the record that does not hold;
// CacheError where there is no room for it.
CacheEntry unpack(const PackageReader& reader, const Library& library, const Unpacking& how);
CacheEntry unpack(const PackageReader& reader, const Target& target, const Unpacking& how);

}  // namespace exportkit
