// Decides which files count as verified without being read again. exportkit/runtime/cache has the rules.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "package/reader.h"

namespace exportkit {

// A file's state when its content was verified.
struct VerifiedFile {
  std::string sha256;
  FileState state;
};

// The record of the verified files in a folder of unpacked files, by its name there.
inline constexpr const char* kEntryRecord = "~verified.json";

// The time now, in nanoseconds since 1970.
int64_t now_ns();

// $EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache. It need not exist yet.
std::filesystem::path cache_directory();

// Creates a folder of the cache, or finds it, and checks that no other user can replace files in it.
// std::system_error: it cannot be created, or another user can change it.
std::filesystem::path private_folder(const std::filesystem::path& root, const std::vector<std::string>& parts);

// Opens an existing folder of the cache; nothing if there is none. std::system_error: another user can change the
// folder or the cache.
Descriptor open_private_folder(const std::filesystem::path& root, const std::string& part);

// Checks every record's digest: DigestMismatchError. Skips this if it was done before and the file's state has not
// changed, unless `always` is set. Returns whether the records were read.
//
// A file's inode number and times come from its medium, so whoever supplies the medium can choose them. Therefore, if a
// signature was required, only a check by this process counts.
bool verify_once(const PackageReader& reader, bool always);

// Whether the folder's record shows, without reading them, that its files have these digests (by file name). It counts
// only if nobody else can have written it, and not later than now.
bool is_verified(const std::filesystem::path& folder, const std::map<std::string, std::string>& digests);

// The state of a file if it has this content and only we can change it, else nothing. Links do not count.
std::optional<FileState> state_if_content(const std::filesystem::path& path, const std::string& sha256);

// Writes the folder's record if possible. Takes the time from the clock that sets file times, after it has passed these
// files' last change, so that the next change gives them a later time.
void write_entry_record(const std::filesystem::path& folder, const std::map<std::string, VerifiedFile>& files);

// Notes that something was used, for `exportkit doctor --prune-cache`.
void touch(const std::filesystem::path& path);

}  // namespace exportkit
