// Files that are there whole or not at all, and what goes away with the process that made it, however that ends: the
// twin of exportkit/package/atomic.py. What is unfinished has a temporary name and is locked by its maker; what has
// such a name and no lock was left by a process that was killed, and the next one to write there removes it, or
// `exportkit cache prune`.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace exportkit {

// What the system says of a file. what() is the reason and then the path: "No space left on device: /tmp/x".
class FileError : public std::system_error {
 public:
  explicit FileError(const std::filesystem::path& path, int error = errno) : FileError(path, message(error), error) {}
  FileError(const std::filesystem::path& path, const std::string& reason, int error)
      : std::system_error(error, std::generic_category()), what_(reason + ": " + path.string()) {}

  const char* what() const noexcept override { return what_.c_str(); }

 private:
  static std::string message(int error) { return std::generic_category().message(error); }

  std::string what_;
};

// What a system_error says, the reason first, whoever threw it.
std::string reason_of(const std::system_error& error);

// An open file, closed with this.
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

// A file that takes its name when it is complete, and goes away if that never comes. The disk is not waited for.
// FileError where it cannot be written.
class WrittenWhole {
 public:
  WrittenWhole(std::filesystem::path path, mode_t mode);
  ~WrittenWhole();
  WrittenWhole(const WrittenWhole&) = delete;
  WrittenWhole& operator=(const WrittenWhole&) = delete;

  int fd() const { return file_.get(); }
  void write(std::string_view data);
  void finish();

 private:
  std::filesystem::path path_, temporary_;
  Descriptor file_;
};

// A private folder in the system's temporary directory, which goes away with this, unless this process is a fork of the
// one that made it. Those of the same prefix whose makers were killed go away before it is made. FileError.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& prefix);
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
