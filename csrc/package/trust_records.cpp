#include "package/trust_records.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "package/atomic.h"
#include "package/digests.h"
#include "package/guarded.h"
#include "package/json_fields.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPackages = "packages";  // the folder of packages' records
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kMargin = 2 * kSecond;  // the coarsest file times, on FAT
constexpr size_t kMaxRecordBytes = size_t{16} << 20;
constexpr int kMaxDepth = 8;  // of brackets

// Opens a file that only we can change; nothing for any other file, or if it cannot be read.
Descriptor open_ours(const fs::path& path, struct stat& status) {
  // Non-blocking, or a FIFO would wait for a writer.
  Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  const bool ours = file && fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode) && !others_may_change(status);
  return ours ? std::move(file) : Descriptor();
}

// --- records as JSON -------------------------------------------------------------------------------------------------

constexpr auto file_state =
    object(FIELD(FileState, device, integer), FIELD(FileState, inode, integer), FIELD(FileState, size, integer),
           FIELD(FileState, mtime_ns, integer), FIELD(FileState, ctime_ns, integer));

std::string to_json(const FileState& state) {
  return "{\"device\":" + std::to_string(state.device) + ",\"inode\":" + std::to_string(state.inode) +
         ",\"size\":" + std::to_string(state.size) + ",\"mtime_ns\":" + std::to_string(state.mtime_ns) +
         ",\"ctime_ns\":" + std::to_string(state.ctime_ns) + "}";
}

// Calls `read` on a record that only we can have written; false if there is no such record, or it is malformed.
bool read_record(const fs::path& path, const std::function<void(JsonReader&)>& read) {
  struct stat status{};
  const Descriptor file = open_ours(path, status);
  if (!file || static_cast<size_t>(status.st_size) > kMaxRecordBytes) return false;
  try {
    const std::string content = read_at(file.get(), 0, static_cast<uint64_t>(status.st_size));
    JsonReader json = JsonReader::checked(content, kMaxDepth);
    read(json);
    return true;
  } catch (const JsonError&) {
    return false;
  } catch (const std::system_error&) {
    return false;
  }
}

// Writes a record if possible; without it, files are hashed again. `make` gets the open file.
void write_record(const fs::path& path, const std::function<std::string(int fd)>& make) {
  try {
    WrittenWhole file(path, 0600);
    file.write(make(file.fd()));
    file.finish();
  } catch (const std::system_error&) {
  }
}

// The time of the clock that sets file times, which ticks every few milliseconds.
int64_t time_after(int64_t changed_ns, int fd) {
  int64_t now = 0;
  for (int tries = 0; tries < 20; ++tries) {
    struct stat status{};
    if (futimens(fd, nullptr) != 0 || fstat(fd, &status) != 0) throw FileError("the record");
    now = FileState::of(status).mtime_ns;
    if (now > changed_ns || changed_ns >= now + kSecond)
      break;  // past the change, or far before it because the clock was set back
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return now;
}

// --- packages --------------------------------------------------------------------------------------------------------

// The path of a package's record; nothing if the cache cannot be used.
std::optional<fs::path> record_path(const struct stat& status) {
  try {
    return private_folder(cache_directory(), {kPackages}) /
           (std::to_string(status.st_dev) + "-" + std::to_string(status.st_ino) + ".json");
  } catch (const std::system_error&) {
    return std::nullopt;
  }
}

// Whether this process has verified a package, or has done so `now`.
bool verified_here(const FileState& state, const std::string& manifest_sha256, bool now = false) {
  // Never destroyed, because threads may outlive static objects.
  static auto& mutex = *new std::mutex;
  static auto& packages = *new std::set<std::pair<FileState, std::string>>;
  const std::lock_guard lock(mutex);
  if (now) packages.emplace(state, manifest_sha256);
  return packages.contains({state, manifest_sha256});
}

// The path without links. Replacing one later cannot redirect the dynamic linker.
fs::path guarded(const fs::path& path) {
  const Followed found = follow(path);
  if (!found.reason.empty()) throw FileError(path, "it " + found.reason, EACCES);
  return found.path;
}

// Checks that the path is a folder and that nobody else can change its contents.
void check_ours(const fs::path& folder) {
  struct stat status{};
  if (lstat(folder.c_str(), &status) != 0) throw FileError(folder);
  if (const char* reason = others_may_change(status)) throw FileError(folder, std::string("it ") + reason, EACCES);
  if (!S_ISDIR(status.st_mode)) throw FileError(folder, EEXIST);
}

bool is_known(const PackageReader& reader, const struct stat& status, const fs::path& path) {
  int64_t checked_ns = 0;
  std::string manifest_sha256;
  FileState state{};
  const bool read = read_record(path, [&](JsonReader& json) {
    fields(json, field("checked_ns", checked_ns, integer), field("manifest_sha256", manifest_sha256, text),
           field("state", state, file_state));
  });
  return read && checked_ns <= now_ns() && state == FileState::of(status) &&
         manifest_sha256 == reader.manifest_sha256();
}

}  // namespace

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

fs::path cache_directory() {
  const std::string own = environment("EXPORTKIT_CACHE");
  return own.empty() ? user_folder("XDG_CACHE_HOME", ".cache") : fs::path(own);
}

fs::path private_folder(const fs::path& root, const std::vector<std::string>& parts) {
  fs::create_directories(guarded(root).parent_path());
  fs::path folder = guarded(root);
  for (auto part = parts.begin();; folder /= *part++) {
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) throw FileError(folder);
    check_ours(folder);
    if (part == parts.end()) return folder;
  }
}

Descriptor open_private_folder(const fs::path& root, const std::string& part) {
  const fs::path top = guarded(root);
  struct stat status{};
  for (const fs::path& folder : {top, top / part}) {
    if (lstat(folder.c_str(), &status) != 0 && errno == ENOENT) return Descriptor();
    check_ours(folder);
  }
  Descriptor folder(open((top / part).c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder) throw FileError(top / part);
  return folder;
}

bool verify_once(const PackageReader& reader, bool always) {
  const struct stat status = reader.status();
  const FileState state = FileState::of(status);
  const bool demanded = !reader.signers().empty();
  const std::optional<fs::path> path = record_path(status);
  const bool known =
      demanded ? verified_here(state, reader.manifest_sha256()) : path && is_known(reader, status, *path);
  if (known && !always && !others_may_change(status)) {
    if (path) touch(*path);
    return false;
  }
  const int64_t started = now_ns();
  reader.verify();
  if (state != FileState::of(reader.status()) || others_may_change(status) || state.changed_ns() + kMargin > started) {
    return true;
  }
  verified_here(state, reader.manifest_sha256(), /*now=*/true);
  if (path) {
    write_record(*path, [&](int) {
      return "{\"checked_ns\":" + std::to_string(started) + ",\"manifest_sha256\":\"" + reader.manifest_sha256() +
             "\",\"state\":" + to_json(state) + "}";
    });
  }
  return true;
}

bool is_verified(const fs::path& folder, const std::map<std::string, std::string>& digests) {
  int64_t checked_ns = 0;
  std::map<std::string, VerifiedFile> files;
  const bool found = read_record(folder / kEntryRecord, [&](JsonReader& json) {
    const auto file = object(FIELD(VerifiedFile, sha256, text), FIELD(VerifiedFile, state, file_state));
    fields(json, field("checked_ns", checked_ns, integer), field("files", files, map_of(file)));
  });
  if (!found || checked_ns > now_ns()) return false;
  return std::ranges::all_of(digests, [&](const auto& expected) {
    const auto& [name, sha256] = expected;
    const auto verified = files.find(name);
    if (verified == files.end()) return false;
    const FileState& state = verified->second.state;
    struct stat status{};
    return verified->second.sha256 == sha256 && state.changed_ns() < checked_ns &&
           lstat((folder / name).c_str(), &status) == 0 && !others_may_change(status) && FileState::of(status) == state;
  });
}

std::optional<FileState> state_if_content(const fs::path& path, const std::string& sha256) {
  struct stat status{};
  const Descriptor file = open_ours(path, status);
  if (!file) return std::nullopt;
  Sha256 digest;
  read_blocks(file.get(), 0, static_cast<uint64_t>(status.st_size),
              [&](std::string_view block) { digest.update(block.data(), block.size()); });
  return digest.hex() == sha256 ? std::optional(FileState::of(status)) : std::nullopt;
}

void write_entry_record(const fs::path& folder, const std::map<std::string, VerifiedFile>& files) {
  int64_t changed_ns = 0;
  std::string text;
  for (const auto& [name, file] : files) {  // record names need no escapes
    changed_ns = std::max(changed_ns, file.state.changed_ns());
    text += (text.empty() ? "\"" : ",\"") + name + "\":{\"sha256\":\"" + file.sha256 +
            "\",\"state\":" + to_json(file.state) + "}";
  }
  write_record(folder / kEntryRecord, [&](int fd) {
    return "{\"checked_ns\":" + std::to_string(time_after(changed_ns, fd)) + ",\"files\":{" + text + "}}";
  });
}

void touch(const fs::path& path) { utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }

}  // namespace exportkit
