// Unpacks packages' files once for all processes. exportkit/runtime/cache has the layout and the rules.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "package/atomic.h"
#include "package/reader.h"

namespace exportkit {

inline constexpr const char* kWritersLock = "~lock";
inline constexpr const char* kCompiled = "compiled";

// An unpacked entry in use: `exportkit doctor --prune-cache` does not remove it while this object lives.
struct CacheEntry {
  std::filesystem::path folder;
  std::filesystem::path library;  // in the folder; for a target, the model
  Descriptor lock;
};

struct Unpacking {
  bool always = false;  // whether to hash files that count as verified
  // Called with the reason if the cache cannot be used and a temporary directory is used instead.
  std::function<void(const std::string&)> warn;
};

// Unpacks an operator library, the only file of its entry, or the files of a code folder (manifest.h, code_folder).
// Throws the error of a wrong record; CacheError if there is no room; UsageError if there is no such folder.
CacheEntry unpack(const PackageReader& reader, const Library& library, const Unpacking& how);
CacheEntry unpack_code(const PackageReader& reader, std::string_view folder, const Unpacking& how);

// Returns the entry of compiled code. `digest` is what it was compiled from: 64 hexadecimal digits. The export that
// compiles it fills the folder. Throws std::system_error if the cache cannot be used.
CacheEntry compiled_entry(const std::string& digest);

}  // namespace exportkit
