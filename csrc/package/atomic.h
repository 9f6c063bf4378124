// Atomic writing of files, and temporary folders that do not outlive their process, even a killed one.
// An unfinished file has a temporary name and is locked by the process that writes it. A temporary name without a lock
// was left by a killed process; the next process that writes there removes it, or `exportkit doctor --prune-cache`.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace exportkit {

// A system error for a file. what() is the reason, then the path: "No space left on device: /tmp/x".
class FileError : public std::system_error {
 public:
  explicit FileError(const std::filesystem::path& path, int error = errno) : FileError(path, message(error), error) {}
  FileError(const std::filesystem::path& path, const std::string& reason, int error)
      : std::system_error(error, std::generic_category()),
        path_(path),
        reason_(reason),
        what_(reason + ": " + path.string()) {}

  const char* what() const noexcept override { return what_.c_str(); }
  const std::filesystem::path& path() const { return path_; }
  const std::string& reason() const { return reason_; }

 private:
  static std::string message(int error) { return std::generic_category().message(error); }

  std::filesystem::path path_;
  std::string reason_, what_;
};

// The message of a system_error, with the reason first whatever its class.
std::string reason_of(const std::system_error& error);

// Owns an open file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Unfinished files are named `<prefix>.<16 hexadecimal digits>.tmp`. These tell whether a name is one, and its prefix.
bool is_temporary(std::string_view name);
std::string_view temporary_prefix(std::string_view name);

// The sorted names in a folder; empty if it cannot be read.
std::vector<std::string> names_in(const std::filesystem::path& folder);

// Removes a file, or a folder and its contents. Ignores what cannot be removed.
void remove_tree(const std::filesystem::path& path);

// A file that gets its name when it is complete, and is removed if it is never completed. FileError if it cannot be
// written.
class WrittenWhole {
 public:
  WrittenWhole(std::filesystem::path path, mode_t mode);
  ~WrittenWhole();
  WrittenWhole(const WrittenWhole&) = delete;
  WrittenWhole& operator=(const WrittenWhole&) = delete;

  int fd() const { return file_.get(); }
  // Takes the room for so many bytes, where the file system can, so that a full disk is known before they are written.
  void reserve(uint64_t size);
  void write(std::string_view data);
  // Gives the file its name. If `durable`, waits first until the data reach the disk; files that are checked each time
  // they are read do not need that.
  void finish(bool durable = false);

 private:
  std::filesystem::path path_, temporary_;
  Descriptor file_;
};

// A private folder. The process that created it removes it with this object; forks of that process do not. First
// removes folders of the same prefix that killed processes left. FileError.
class TemporaryFolder {
 public:
  TemporaryFolder(const std::filesystem::path& parent, const std::string& prefix);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  pid_t maker() const { return maker_; }

 private:
  std::filesystem::path path_;
  Descriptor lock_;
  pid_t maker_;
};

}  // namespace exportkit
