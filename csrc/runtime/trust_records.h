// Which files count as verified without being read again: the twin of exportkit/runtime/cache/trust.py, with the same
// records in the same places, so that each honours what the other one verified. exportkit/runtime/cache has the rules.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/package/reader.h"

namespace exportkit {

// What a file was when its content was hashed.
struct FileState {
  uint64_t device, inode;
  int64_t size, mtime_ns, ctime_ns;

  static FileState of(const struct stat& status);
  bool operator==(const FileState&) const = default;
  // When it was last changed, by the later of both times.
  int64_t changed_ns() const { return std::max(mtime_ns, ctime_ns); }
};

// A file that had this content.
struct VerifiedFile {
  std::string sha256;
  FileState state;
};

// What was verified in a folder of unpacked files.
struct EntryRecord {
  int64_t checked_ns;
  std::map<std::string, VerifiedFile> files;
};

// $EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache. It need not exist yet.
std::filesystem::path cache_directory();

// A folder under the cache's, made where it is missing, in which no other user could exchange a file for theirs.
// std::system_error: it cannot be made, or is not ours alone.
std::filesystem::path private_folder(const std::filesystem::path& root, const std::vector<std::string>& parts);

// Checks every record's digest, unless that was done and the file is what it was then, or `again` is set. Whether they
// were read. DigestMismatchError.
bool verify_package(const PackageReader& reader, bool again);

// Whether these files, of these digests by their names, are in a folder and need not be read to know it.
bool is_verified(const std::filesystem::path& folder, const std::optional<EntryRecord>& record,
                 const std::map<std::string, std::string>& digests);

// The state of a file of this content that only we can change; nothing if there is none. A link is no such file.
std::optional<FileState> state_if_content(const std::filesystem::path& path, const std::string& sha256);

// The record of an entry that only we can have written, and not later than now; nothing for anything else.
std::optional<EntryRecord> read_entry_record(const std::filesystem::path& path);

// Writes it, if that can be done, with the time by the clock that gives files their times, once that has gone past
// these files' last change: the next change will show in theirs.
void write_entry_record(const std::filesystem::path& path, const std::map<std::string, VerifiedFile>& files);

// Notes that something was used, for `exportkit cache prune` to know what was not.
void touch(const std::filesystem::path& path);

}  // namespace exportkit
