#include "package/opened_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "package/errors.h"
#include "package/package_folder.h"

namespace exportkit {
namespace {

constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
constexpr size_t kPiece = size_t{1} << 20;
constexpr unsigned kNotExecutable = 8;  // MFD_NOEXEC_SEAL, which some hosts demand and Linux before 6.3 does not know
constexpr const char* kByFile = "Write the package to a file, and load that: weights of a file take no memory.";

std::string system_message(int error) { return std::generic_category().message(error); }

Descriptor new_memory() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Descriptor file(memfd_create("exportkit-package", kFlags | kNotExecutable));
  if (!file && errno == EINVAL) file = Descriptor(memfd_create("exportkit-package", kFlags));
  if (!file)
    throw Error(errors::kHost, "memfd_create gives no memory for a package: " + system_message(errno), kByFile);
  return file;
}

std::string called(int descriptor) { return "descriptor " + std::to_string(descriptor); }

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "no file";
}

// What a descriptor is open on, which must be something that can be read.
mode_t readable_kind(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  struct stat status{};
  if (flags < 0 || fstat(descriptor, &status) != 0) {
    throw Error(errors::kUsage, called(descriptor) + " is not open: " + system_message(errno));
  }
  const char* const reason = (flags & O_PATH) != 0             ? "only names a file (O_PATH)"
                             : (flags & O_ACCMODE) == O_WRONLY ? "is open for writing only"
                             : (flags & O_DIRECT) != 0         ? "reads whole blocks of a disk only (O_DIRECT)"
                                                               : nullptr;
  if (reason != nullptr) throw Error(errors::kUsage, called(descriptor) + " " + reason, "Open the file with O_RDONLY.");
  return status.st_mode;
}

// Waits for a descriptor that does not wait itself.
void wait_for(int descriptor) {
  pollfd waiting{descriptor, POLLIN, 0};
  poll(&waiting, 1, -1);
}

}  // namespace

bool is_sealed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kSeals) == kSeals;
}

OpenedFile OpenedFile::by_path(const std::filesystem::path& path) {
  // Non-blocking, or a FIFO would wait for a writer.
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) throw Error(errors::kUsage, "cannot open " + path.string() + ": " + system_message(errno));
  struct stat status{};
  if (fstat(file.get(), &status) == 0 && S_ISDIR(status.st_mode)) return open_in_folder(path);
  return {std::move(file), path, path.filename().string()};
}

OpenedFile OpenedFile::of_file(int descriptor) {
  if (const mode_t mode = readable_kind(descriptor); !S_ISREG(mode)) {
    throw Error(errors::kNotAnArchive,
                called(descriptor) + " is open on " + kind_of(mode) + "; a package is one .pt2 file");
  }
  Descriptor own(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (!own) throw FileError(called(descriptor));
  return {std::move(own), {}, called(descriptor)};
}

OpenedFile OpenedFile::of_descriptor(int descriptor, uint64_t stream_limit) {
  const mode_t mode = readable_kind(descriptor);
  if (!S_ISFIFO(mode) && !S_ISSOCK(mode)) return of_file(descriptor);
  ArrivingPackage arriving(called(descriptor), stream_limit);
  const auto piece = std::make_unique<char[]>(kPiece);
  while (true) {
    const ssize_t count = read(descriptor, piece.get(), kPiece);
    if (count == 0) return std::move(arriving).seal();
    if (count > 0) {
      arriving.write({piece.get(), static_cast<size_t>(count)});
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_for(descriptor);
    } else if (errno != EINTR) {
      throw FileError(called(descriptor));
    }
  }
}

OpenedFile OpenedFile::of_bytes(std::string_view bytes) {
  ArrivingPackage arriving(std::to_string(bytes.size()) + " bytes in memory", bytes.size());
  arriving.write(bytes);
  return std::move(arriving).seal();
}

ArrivingPackage::ArrivingPackage(std::string name, uint64_t limit)
    : name_(std::move(name)), limit_(limit), file_(new_memory()) {}

void ArrivingPackage::write(std::string_view piece) {
  if (piece.size() > limit_ - size_) {
    throw Error(errors::kUsage, name_ + " gave more than " + std::to_string(limit_) + " bytes, the limit of a stream",
                std::string("If the package is larger, set stream_limit higher. ") + kByFile);
  }
  while (!piece.empty()) {
    // By the system, which notices memory that is not there: the pages of a file that was cut short.
    const ssize_t count = ::write(file_.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EFAULT) {
      throw Error(errors::kUsage,
                  name_ + " cannot be read at byte " + std::to_string(size_) + ": there is no memory at its address",
                  "Memory of a file that is mapped goes when the file is cut short. Load the file instead.");
    }
    if (count < 0) throw FileError("memory for " + name_);
    piece.remove_prefix(static_cast<size_t>(count));
    size_ += static_cast<uint64_t>(count);
  }
}

OpenedFile ArrivingPackage::seal() && {
  if (fcntl(file_.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    throw Error(errors::kHost, "the memory of " + name_ + " cannot be sealed: " + system_message(errno),
                "Another process may have it open, through /proc. Load it again.");
  }
  return {std::move(file_), {}, std::move(name_)};
}

}  // namespace exportkit
