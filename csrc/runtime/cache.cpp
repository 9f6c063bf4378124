#include "runtime/cache.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <system_error>

#include "runtime/package/digest.h"
#include "runtime/package/errors.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAotInductorDir = "data/aotinductor/";
constexpr int kRaces = 20;  // how often an entry may be deleted while it is being unpacked

// What an entry is to hold: the folder it is in, its name there, and the package's records by the names of their files.
struct Contents {
  std::string kind, digest;
  std::map<std::string, const Record*> records;
};

[[noreturn]] void fail(int error, const std::string& path) {
  throw std::system_error(error, std::generic_category(), path);
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// $EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache. It need not exist yet.
fs::path cache_directory() {
  if (const std::string own = variable("EXPORTKIT_CACHE"); !own.empty()) return own;
  // The XDG specification: a relative path in it is to be ignored.
  if (const fs::path base = variable("XDG_CACHE_HOME"); base.is_absolute()) return base / "exportkit";
  std::string home = variable("HOME");
  if (home.empty()) {
    const passwd* user = getpwuid(getuid());
    home = user == nullptr ? "~" : user->pw_dir;
  }
  return fs::path(home) / ".cache" / "exportkit";
}

// Why another user could change a file or what is in a directory; null if none can.
const char* others_may_change(const struct stat& status) {
  if (S_ISLNK(status.st_mode)) return "it is a link";
  if (status.st_uid != 0 && status.st_uid != geteuid()) return "it belongs to another user";  // root's will do
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "other users may write to it";
  return nullptr;
}

struct stat status_of(const fs::path& path) {
  struct stat status{};
  if (lstat(path.c_str(), &status) != 0) fail(errno, path);
  return status;
}

// A folder under the cache's, made where it is missing, in which no other user could exchange a file for theirs.
fs::path private_folder(const fs::path& directory, const Contents& contents) {
  // Links on the way are followed once, here: who may exchange one cannot lead the dynamic linker elsewhere later.
  const fs::path root = fs::weakly_canonical(fs::absolute(directory));
  fs::create_directories(root.parent_path());
  fs::path folder = root;
  for (const std::string& part : {std::string(), contents.kind, contents.digest}) {
    if (!part.empty()) folder /= part;
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) fail(errno, folder);
    const struct stat status = status_of(folder);
    if (const char* reason = others_may_change(status)) {
      throw std::system_error(EACCES, std::generic_category(), folder.string() + ": " + reason);
    }
    if (!S_ISDIR(status.st_mode)) fail(ENOTDIR, folder);
  }
  for (fs::path above = root.parent_path();; above = above.parent_path()) {
    const mode_t mode = status_of(above).st_mode;
    if ((mode & S_IWOTH) != 0 && (mode & S_ISVTX) == 0) {  // /tmp's bit: only its owner renames what is in it
      throw std::system_error(EACCES, std::generic_category(),
                              above.string() + ": other users may rename what is in it");
    }
    if (above == above.parent_path()) return folder;
  }
}

// Whether there is a file of this content that only we can change; a link is no such file.
bool holds(const fs::path& path, const std::string& sha256) {
  // Non-blocking, or a FIFO would wait for a writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
  if (file.get() < 0 || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || others_may_change(status)) {
    return false;
  }
  Sha256 digest;
  const auto buffer = std::make_unique<char[]>(size_t{1} << 20);
  ssize_t count = 0;
  while ((count = read(file.get(), buffer.get(), size_t{1} << 20)) > 0)
    digest.update(buffer.get(), static_cast<size_t>(count));
  return count == 0 && digest.hex() == sha256;
}

void fill(const fs::path& folder, const PackageReader& reader, const Contents& contents) {
  // Writers take turns, where files can be locked: the others would write the same once more.
  const Descriptor turns(open((folder / "~lock").c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (turns.get() >= 0) flock(turns.get(), LOCK_EX);
  for (const auto& [name, record] : contents.records) {
    const fs::path path = folder / name;
    if (holds(path, record->sha256)) continue;
    fs::create_directories(path.parent_path());
    reader.extract(record->name, path, 0600);
  }
}

CacheEntry unpack_in(const fs::path& root, const PackageReader& reader, const Contents& contents,
                     const fs::path& temporary = {}) {
  for (int race = 0; race < kRaces; ++race) {
    const fs::path folder = private_folder(root, contents);
    Descriptor fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (fd.get() < 0 && errno == ENOENT) continue;  // deleted under our hands
    if (fd.get() < 0) fail(errno, folder);
    flock(fd.get(), LOCK_SH);
    try {
      fill(folder, reader, contents);
    } catch (const std::system_error& error) {
      if (error.code() == std::errc::no_such_file_or_directory) continue;
      throw;
    }
    struct stat ours{}, there{};
    if (fstat(fd.get(), &ours) == 0 && lstat(folder.c_str(), &there) == 0 && ours.st_ino == there.st_ino) {
      futimens(fd.get(), nullptr);  // for `prune` to know what was not used
      return {folder, fd.release(), temporary};
    }
  }
  fail(ENOENT, (root / contents.kind / contents.digest).string() + " is deleted again and again");
}

CacheEntry unpack(const PackageReader& reader, const Contents& contents) {
  std::string reason;
  try {
    return unpack_in(cache_directory(), reader, contents);
  } catch (const std::system_error& error) {  // of the file system: fs::filesystem_error is one
    reason = error.what();
  }
  std::cerr << "exportkit: cannot use the cache " << cache_directory().string() << " (" << reason
            << "); unpacking to a temporary directory instead. Set EXPORTKIT_CACHE to a private, writable directory.\n";
  std::string folder;
  try {
    folder = (fs::temp_directory_path() / "exportkit-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) fail(errno, folder);
    return unpack_in(folder, reader, contents, folder);
  } catch (const std::system_error& error) {
    std::error_code ignored;
    if (!folder.empty()) fs::remove_all(folder, ignored);
    throw Error(errors::kCache,
                "cannot unpack " + reader.path().filename().string() + ": not to the cache " +
                    cache_directory().string() + " (" + reason + "), and not to a temporary directory (" +
                    error.what() + ")",
                "Make room, or set EXPORTKIT_CACHE to a private, writable directory that has some.");
  }
}

}  // namespace

CacheEntry::CacheEntry(CacheEntry&& other) noexcept
    : folder_(std::move(other.folder_)),
      fd_(std::exchange(other.fd_, -1)),
      temporary_(std::exchange(other.temporary_, {})) {}

CacheEntry::~CacheEntry() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
  if (fd_ >= 0) close(fd_);
}

CacheEntry unpack(const PackageReader& reader, const Library& library) {
  const std::string name = library.record.substr(library.record.rfind('/') + 1);
  return unpack(reader, {"libraries", library.sha256, {{name, &reader.record(library.record)}}});
}

CacheEntry unpack(const PackageReader& reader, const Target& target) {
  const std::string folder = std::string(kAotInductorDir) + target.name + "/";
  Contents contents{"targets", {}, {}};
  for (const Record& record : reader.manifest().records) {
    if (record.name.starts_with(folder)) contents.records.emplace(record.name.substr(folder.size()), &record);
  }
  std::string lines;
  for (const auto& [name, record] : contents.records) lines += record->sha256 + "  " + name + "\n";
  contents.digest = sha256_hex(lines);
  return unpack(reader, contents);
}

}  // namespace exportkit
