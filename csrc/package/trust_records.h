// Which files count as verified without being read again. exportkit/runtime/cache has the rules.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "package/reader.h"

namespace exportkit {

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

// A folder of the cache that is there, open, if it and the cache are ours alone; nothing where there is none.
// std::system_error: somebody else may change it.
Descriptor open_private_folder(const std::filesystem::path& root, const std::string& part);

// Checks every record's digest, unless that was done and the file is what it was then, or `always` is set. Whether they
// were read. DigestMismatchError.
//
// What was noted of a file is data of the medium that it is on: who supplies that chooses it. So where a signature was
// asked for, only what this process has read itself is believed.
bool verify_once(const PackageReader& reader, bool always);

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
