#include "runtime/package/atomic.h"

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

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRandomDigits = 16;
constexpr std::string_view kSuffix = ".tmp";

// A name of its own in `folder`.
fs::path temporary_name(const fs::path& folder, const std::string& prefix) {
  uint64_t random;
  if (getrandom(&random, sizeof random, 0) != sizeof random) throw FileError("getrandom");
  std::array<char, kRandomDigits + 1> hex;
  std::snprintf(hex.data(), hex.size(), "%016" PRIx64, random);
  return folder / (prefix + "." + hex.data() + std::string(kSuffix));
}

bool is_temporary(std::string_view name, std::string_view prefix) {
  if (name.size() != prefix.size() + 1 + kRandomDigits + kSuffix.size()) return false;
  if (!name.starts_with(prefix) || name[prefix.size()] != '.' || !name.ends_with(kSuffix)) return false;
  const std::string_view digits = name.substr(prefix.size() + 1, kRandomDigits);
  return digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Not std::filesystem's, nor its iterators: libtorch exports those of an older libstdc++, which crash in a newer one.
void remove_tree(const fs::path& path) {
  constexpr int kOpenFolders = 16;
  const auto remove_one = [](const char* name, const struct stat*, int, FTW*) { return std::remove(name), 0; };
  nftw(path.c_str(), remove_one, kOpenFolders, FTW_DEPTH | FTW_PHYS);
}

// What was taken for left over between its making and its locking is gone by now.
bool is_gone(int fd) {
  struct stat status{};
  return fstat(fd, &status) != 0 || status.st_nlink == 0;
}

void remove_unlocked(const fs::path& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
  if (!file || fstat(file.get(), &status) != 0 || status.st_uid != geteuid()) return;
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;  // its maker is at work
  remove_tree(path);
}

void remove_leftovers(const fs::path& folder, const std::string& prefix) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  if (!entries) return;
  while (const dirent* entry = readdir(entries.get())) {
    if (is_temporary(entry->d_name, prefix)) remove_unlocked(folder / entry->d_name);
  }
}

}  // namespace

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
  remove_leftovers(path_.parent_path(), prefix);
  do {
    // In the same folder, or the rename would be a copy.
    temporary_ = temporary_name(path_.parent_path(), prefix);
    file_ = Descriptor(open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
    if (!file_) throw FileError(temporary_);
    flock(file_.get(), LOCK_EX);
  } while (is_gone(file_.get()));
}

WrittenWhole::~WrittenWhole() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void WrittenWhole::write(std::string_view data) {
  while (!data.empty()) {
    const ssize_t count = ::write(file_.get(), data.data(), data.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FileError(path_);
    data.remove_prefix(static_cast<size_t>(count));
  }
}

void WrittenWhole::finish() {
  // Some file systems say only now that the disk is full.
  if (close(file_.release()) != 0) throw FileError(path_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) throw FileError(path_);
  temporary_.clear();
}

TemporaryFolder::TemporaryFolder(const std::string& prefix) : maker_(getpid()) {
  const fs::path parent = fs::temp_directory_path();
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
