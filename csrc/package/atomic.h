// Files that are there whole or not at all, and what goes away with the process that made it, however that ends.
// What is unfinished has a temporary name and is locked by its maker; what has
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

// Unfinished files are named `<prefix>.<16 hexadecimal digits>.tmp`. Whether this is such a name, and its prefix.
bool is_temporary(std::string_view name);
std::string_view temporary_prefix(std::string_view name);

// Removes a file, or a folder with all that is in it; what cannot be removed stays.
void remove_tree(const std::filesystem::path& path);

// A file that takes its name when it is complete, and goes away if that never comes. FileError where it cannot be
// written.
class WrittenWhole {
 public:
  WrittenWhole(std::filesystem::path path, mode_t mode);
  ~WrittenWhole();
  WrittenWhole(const WrittenWhole&) = delete;
  WrittenWhole& operator=(const WrittenWhole&) = delete;

  int fd() const { return file_.get(); }
  void write(std::string_view data);
  // `durable`: whether it has reached the disk before it takes its name. Where it is checked again each time it is
  // read, waiting for the disk buys nothing.
  void finish(bool durable = false);

 private:
  std::filesystem::path path_, temporary_;
  Descriptor file_;
};

// A private folder, which goes away with this, unless this process is a fork of the one that made it. Those of the same
// prefix whose makers were killed go away before it is made. FileError.
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
