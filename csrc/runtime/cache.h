// What is unpacked from packages, in the folders that the Python runtime uses: exportkit/runtime/cache has the layout
// and the rules. Files that are there are hashed each time; what Python remembers of them is not looked at.
#pragma once

#include <filesystem>

#include "runtime/package/reader.h"

namespace exportkit {

// An unpacked entry that is in use: `exportkit cache prune` leaves it alone as long as this lives.
class CacheEntry {
 public:
  CacheEntry(std::filesystem::path folder, int fd, std::filesystem::path temporary)
      : folder_(std::move(folder)), fd_(fd), temporary_(std::move(temporary)) {}
  CacheEntry(CacheEntry&& other) noexcept;
  CacheEntry& operator=(CacheEntry&&) = delete;
  ~CacheEntry();

  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
  int fd_;
  std::filesystem::path temporary_;  // what took the place of a cache that cannot be used; it goes away with this
};

// An operator library, the only file of its entry; a target's files. The error of the record that does not hold;
// CacheError where there is no room for it.
CacheEntry unpack(const PackageReader& reader, const Library& library);
CacheEntry unpack(const PackageReader& reader, const Target& target);

}  // namespace exportkit
