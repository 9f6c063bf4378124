#include "package/cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "package/digests.h"
#include "package/errors.h"
#include "package/text.h"
#include "package/trust_records.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAotInductorDir = "data/aotinductor/";
constexpr const char* kTemporaryPrefix = "exportkit-cache";
constexpr auto kLockPatience = std::chrono::seconds(60);  // how long to wait for a writer, which may be stopped
constexpr auto kStrangersPatience = std::chrono::milliseconds(500);
constexpr int kRaces = 20;  // how often an entry may be deleted while it is unpacked

// The contents of an entry: its folder, its name there, and the package's records by file name.
struct Contents {
  std::string kind, digest;
  std::map<std::string, const Record*> records;
};

// The model is the last of a target's libraries by name, as in torch's loader.
std::string library_of(const Contents& contents) {
  std::string library;
  for (const auto& [name, record] : contents.records) {
    if (name.ends_with(".so") || contents.records.size() == 1) library = name;
  }
  return library;
}

// How long to wait for a lock: not at all if other users can open the file and hold the lock.
std::chrono::milliseconds patience(int fd) {
  struct stat status{};
  const bool private_file = fstat(fd, &status) == 0 && status.st_uid == geteuid() && (status.st_mode & 077) == 0;
  return private_file ? kLockPatience : kStrangersPatience;
}

// Locks a file. Gives up if the file system has no locks, or if another process keeps the lock for too long.
void lock(int fd, int operation) {
  const auto deadline = std::chrono::steady_clock::now() + patience(fd);
  while (flock(fd, operation | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() >= deadline) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void verify_or_extract(const fs::path& folder, const PackageReader& reader, const Contents& contents) {
  std::map<std::string, VerifiedFile> files;
  for (const auto& [name, record] : contents.records) {
    const fs::path path = folder / name;
    std::optional<FileState> state = state_if_content(path, record->sha256);
    if (!state) {
      fs::create_directories(path.parent_path());
      reader.extract(record->name, path, 0600);
      struct stat status{};
      if (lstat(path.c_str(), &status) != 0) throw FileError(path);
      state = FileState::of(status);
    }
    files.emplace(name, VerifiedFile{record->sha256, *state});
  }
  write_entry_record(folder, files);
}

// Unpacks the files into the folder, unless they are there and verified.
void fill(const fs::path& folder, const PackageReader& reader, const Contents& contents, bool always) {
  std::map<std::string, std::string> digests;
  for (const auto& [name, record] : contents.records) digests.emplace(name, record->sha256);
  const auto verified = [&] { return !always && is_verified(folder, digests); };
  if (!verified()) {
    // Writers take turns if files can be locked, because the others would write the same files again.
    const Descriptor turns(open((folder / kWritersLock).c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!turns && errno == ENOENT) throw FileError(folder);
    if (turns) lock(turns.get(), LOCK_EX);  // else the folder is read-only, but the files may be there
    if (!verified()) verify_or_extract(folder, reader, contents);
  }
  touch(folder);
}

// Makes the folder of an entry, holds it in use, and fills it; again, if it was deleted meanwhile.
CacheEntry held_entry(const fs::path& root, const std::string& kind, const std::string& digest,
                      const std::string& library, const std::function<void(const fs::path&)>& fill_folder) {
  for (int race = 0; race < kRaces; ++race) {
    try {
      const fs::path folder = private_folder(root, {kind, digest});
      Descriptor fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!fd) throw FileError(folder);
      lock(fd.get(), LOCK_SH);
      fill_folder(folder);
      struct stat ours{}, there{};
      const bool same = fstat(fd.get(), &ours) == 0 && lstat(folder.c_str(), &there) == 0 &&
                        ours.st_ino == there.st_ino && ours.st_dev == there.st_dev;
      if (same) return {folder, folder / library, std::move(fd)};
    } catch (const std::system_error& error) {
      const bool gone = error.code() == std::errc::no_such_file_or_directory;
      if (!gone || race + 1 == kRaces) throw;  // else it was deleted meanwhile
    }
  }
  throw FileError(root / kind / digest, "it was deleted repeatedly while it was unpacked", ENOENT);
}

// This process's temporary directory, removed when the process ends.
fs::path fallback_directory() {
  static std::mutex mutex;
  static std::unique_ptr<TemporaryFolder> folder;
  const std::lock_guard lock(mutex);
  if (!folder || folder->maker() != getpid()) {  // a fork needs another one: its parent removes this one
    folder = std::make_unique<TemporaryFolder>(fs::temp_directory_path(), kTemporaryPrefix);
  }
  return folder->path();
}

std::string megabytes(const Contents& contents) {
  int64_t size = 0;
  for (const auto& [name, record] : contents.records) size += record->size;
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(size) / 1e6);
  return text;
}

// The temporary directory, for messages.
std::string temporary_directory() {
  std::error_code unusable;
  const fs::path folder = fs::temp_directory_path(unusable);
  return "the temporary directory" + (unusable ? "" : " " + folder.string());
}

CacheEntry unpack(const PackageReader& reader, const Contents& contents, const Unpacking& how) {
  const auto unpack_in = [&](const fs::path& root) {
    return held_entry(root, contents.kind, contents.digest, library_of(contents),
                      [&](const fs::path& folder) { fill(folder, reader, contents, how.always); });
  };
  const std::string cache = cache_directory().string();
  std::string reason;
  try {
    return unpack_in(cache);
  } catch (const std::system_error& error) {
    reason = reason_of(error);
  }
  if (how.warn) {
    how.warn("exportkit cannot use its cache " + cache + " (" + reason +
             "); unpacking to a temporary directory instead. Set EXPORTKIT_CACHE to a private, writable directory.");
  }
  try {
    return unpack_in(fallback_directory());
  } catch (const std::system_error& error) {
    throw Error(errors::kCache,
                "cannot unpack " + reader.name() + " (" + megabytes(contents) + "), neither to the cache " + cache +
                    " (" + reason + ") nor to " + temporary_directory() + " (" + reason_of(error) + ")",
                "Make room, or set EXPORTKIT_CACHE to a private, writable directory with enough space.");
  }
}

}  // namespace

CacheEntry compiled_entry(const std::string& digest) {
  return held_entry(cache_directory(), kCompiled, digest, "", [](const fs::path& folder) { touch(folder); });
}

CacheEntry unpack(const PackageReader& reader, const Library& library, const Unpacking& how) {
  const std::string name = library.record.substr(library.record.rfind('/') + 1);
  return unpack(reader, {"libraries", library.sha256, {{name, &reader.record(library.record)}}}, how);
}

CacheEntry unpack_code(const PackageReader& reader, std::string_view name, const Unpacking& how) {
  const std::string folder = std::string(kAotInductorDir) + std::string(name) + "/";
  Contents contents{"targets", {}, {}};
  for (const Record& record : reader.manifest().records) {
    if (record.name.starts_with(folder)) contents.records.emplace(record.name.substr(folder.size()), &record);
  }
  if (contents.records.empty()) throw Error(errors::kUsage, "the package has no compiled code in " + shown(name));
  std::string lines;
  for (const auto& [name, record] : contents.records) lines += record->sha256 + "  " + name + "\n";
  contents.digest = sha256_hex(lines);
  return unpack(reader, contents, how);
}

}  // namespace exportkit
