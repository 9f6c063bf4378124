#include "package/atomic.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>

#include "package/text.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRandomDigits = 16;
constexpr std::string_view kSuffix = ".tmp";

// A new random name in `folder`.
fs::path temporary_name(const fs::path& folder, const std::string& prefix) {
  uint64_t random;
  if (getrandom(&random, sizeof random, 0) != sizeof random) throw FileError("getrandom");
  std::array<char, kRandomDigits + 1> hex;
  std::snprintf(hex.data(), hex.size(), "%016" PRIx64, random);
  return folder / (prefix + "." + hex.data() + std::string(kSuffix));
}

// Whether a file or folder was removed as a leftover between its creation and its locking.
bool is_gone(int fd) {
  struct stat status{};
  return fstat(fd, &status) != 0 || status.st_nlink == 0;
}

void remove_unlocked(const fs::path& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
  if (!file || fstat(file.get(), &status) != 0 || status.st_uid != geteuid()) return;
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;  // it is still being written
  remove_tree(path);
}

void remove_leftovers(const fs::path& folder, const std::string& prefix) {
  for (const std::string& name : names_in(folder)) {
    if (is_temporary(name) && temporary_prefix(name) == prefix) remove_unlocked(folder / name);
  }
}

}  // namespace

bool is_temporary(std::string_view name) {
  constexpr size_t kEnding = 1 + kRandomDigits + kSuffix.size();
  if (name.size() <= kEnding || !name.ends_with(kSuffix) || name[name.size() - kEnding] != '.') return false;
  return is_hex(name.substr(name.size() - kEnding + 1, kRandomDigits), kRandomDigits);
}

std::string_view temporary_prefix(std::string_view name) {
  return name.substr(0, name.size() - 1 - kRandomDigits - kSuffix.size());
}

// libtorch exports an older libstdc++'s iterators and remove_all of std::filesystem, which crash with a newer one.
// These functions use neither.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  while (const dirent* entry = entries ? readdir(entries.get()) : nullptr) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::ranges::sort(names);
  return names;
}

void remove_tree(const fs::path& path) {
  constexpr int kOpenFolders = 16;
  const auto remove_one = [](const char* name, const struct stat*, int, FTW*) { return std::remove(name), 0; };
  nftw(path.c_str(), remove_one, kOpenFolders, FTW_DEPTH | FTW_PHYS);
}

std::string reason_of(const std::system_error& error) {
  const auto* of_file = dynamic_cast<const fs::filesystem_error*>(&error);
  if (of_file == nullptr) return error.what();
  return error.code().message() + (of_file->path1().empty() ? "" : ": " + of_file->path1().string());
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

WrittenWhole::WrittenWhole(fs::path path, mode_t mode) : path_(std::move(path)) {
  const std::string prefix = "." + path_.filename().string().substr(0, 200);
  const fs::path folder = path_.has_parent_path() ? path_.parent_path() : fs::path(".");
  remove_leftovers(folder, prefix);
  do {
    // In the same folder, because a rename to another file system fails.
    temporary_ = temporary_name(folder, prefix);
    file_ = Descriptor(open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
    if (!file_) throw FileError(temporary_);
    flock(file_.get(), LOCK_EX);
  } while (is_gone(file_.get()));
}

WrittenWhole::~WrittenWhole() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void WrittenWhole::reserve(uint64_t size) {
  const int error = fallocate(file_.get(), 0, 0, static_cast<off_t>(size)) == 0 ? 0 : errno;
  if (error == ENOSPC || error == EFBIG || error == EDQUOT) {
    throw FileError(path_, std::generic_category().message(error) + ", it needs " + std::to_string(size) + " bytes",
                    error);
  }
}

void WrittenWhole::write(std::string_view data) {
  while (!data.empty()) {
    const ssize_t count = ::write(file_.get(), data.data(), data.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FileError(path_);
    data.remove_prefix(static_cast<size_t>(count));
  }
}

void WrittenWhole::finish(bool durable) {
  if (durable && fsync(file_.get()) != 0) throw FileError(path_);
  // Some file systems report a full disk only on close. The other descriptor keeps the lock until the file has its
  // name, so that nobody removes it as a leftover.
  if (close(dup(file_.get())) != 0) throw FileError(path_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) throw FileError(path_);
  temporary_.clear();
  file_ = Descriptor();
}

TemporaryFolder::TemporaryFolder(const fs::path& parent, const std::string& prefix) : maker_(getpid()) {
  remove_leftovers(parent, prefix);
  do {
    path_ = temporary_name(parent, prefix);
    if (mkdir(path_.c_str(), 0700) != 0) throw FileError(path_);
    lock_ = Descriptor(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!lock_ && errno != ENOENT) throw FileError(path_);
    if (lock_) flock(lock_.get(), LOCK_EX);
  } while (!lock_ || is_gone(lock_.get()));
}

TemporaryFolder::~TemporaryFolder() {
  if (getpid() == maker_) remove_tree(path_);
}

}  // namespace exportkit
