#include "runtime/package/small_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "runtime/package/container.h"

namespace exportkit {
namespace {

constexpr size_t kMaxBytes = size_t{64} << 10;

const char* not_guarded(const struct stat& status) {
  if (status.st_uid != 0 && status.st_uid != geteuid()) return "belongs to another user";
  // /tmp's bit: only the owner of a folder, or of what is in it, renames or removes that.
  const bool sticky = S_ISDIR(status.st_mode) && (status.st_mode & S_ISVTX) != 0;
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0 && !sticky) return "may be written to by other users";
  return nullptr;
}

void check_guarded(const std::filesystem::path& path, const struct stat& status) {
  if (const char* reason = not_guarded(status)) throw std::invalid_argument(reason);
  for (auto folder = std::filesystem::canonical(path).parent_path();; folder = folder.parent_path()) {
    struct stat there{};
    if (stat(folder.c_str(), &there) != 0) throw std::system_error(errno, std::generic_category(), folder);
    if (const char* reason = not_guarded(there)) {
      throw std::invalid_argument("is in " + folder.string() + ", which " + reason);
    }
    if (folder == folder.parent_path()) return;
  }
}

}  // namespace

std::optional<std::string> read_small(const std::filesystem::path& path, bool guarded) {
  // Non-blocking, or a FIFO would wait for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
  const struct Closing {
    int fd;
    ~Closing() { close(fd); }
  } closing{fd};
  struct stat status{};
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), path);
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument("is not a plain file");
  if (guarded) check_guarded(path, status);
  std::string content = read_at(fd, 0, kMaxBytes + 1);
  if (content.size() > kMaxBytes) throw std::invalid_argument("has more than " + std::to_string(kMaxBytes) + " bytes");
  return content;
}

}  // namespace exportkit
