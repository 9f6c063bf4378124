#include "package/mapping.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "package/container.h"
#include "package/errors.h"
#include "package/fork_gate.h"
#include "package/guarded.h"

namespace exportkit {
namespace {

// The records of weights, each once: two weights may share one.
std::set<std::string> weight_records(const Manifest& manifest) {
  std::set<std::string> records;
  for (const Weight& weight : manifest.weights) {
    if (weight.record) records.insert(*weight.record);
  }
  return records;
}

// A record's size in a copy, where records are aligned as in a package.
size_t padded(const Record& record) {
  return (static_cast<size_t>(record.size) + kAlignment - 1) / kAlignment * kAlignment;
}

// Whether a process, such as the file's former owner's, has the file open or mapped for writing: then the kernel grants
// no read lease. Only the file's owner may ask, and some file systems have no leases.
enum class Writers { kNone, kSome, kUnknown };

Writers writers_of(int fd) {
  if (fcntl(fd, F_GETLEASE) != F_UNLCK) return Writers::kUnknown;  // a lease of whoever gave us the descriptor
  // If the file is opened for writing during the lease, the kernel sends this process a signal, which it ignores.
  fcntl(fd, F_SETSIG, SIGURG);
  if (fcntl(fd, F_SETLEASE, F_RDLCK) != 0) return errno == EAGAIN ? Writers::kSome : Writers::kUnknown;
  fcntl(fd, F_SETLEASE, F_UNLCK);
  return Writers::kNone;
}

// Whether the file's content may change after it was verified. A process that has the file open keeps it when the file
// gets another owner, mode or name, so that an owner we cannot ask about counts as one whom somebody else preceded.
bool may_change(const PackageReader& package) {
  if (is_sealed(package.fd())) return false;
  const struct stat status = package.status();
  if (others_may_change(status)) return true;
  const Writers writers = writers_of(package.fd());
  const bool trusted = package.signers().empty() && status.st_uid == geteuid();
  return writers == Writers::kSome || (writers == Writers::kUnknown && !trusted);
}

// The mapped files, by the address of their first byte. Who changes them is at work, so that a child of fork() finds
// the lock free.
struct MappedFiles {
  struct File {
    size_t size;
    int fd;
  };
  std::shared_mutex mutex;
  std::map<const char*, File> files;
};

MappedFiles& mapped_files() {
  static auto& only = *new MappedFiles;  // never destroyed: threads may outlive static objects
  return only;
}

}  // namespace

// The other constructor first: the destructor then also runs if this one throws.
WeightMapping::WeightMapping(const PackageReader& package) : WeightMapping() {
  if (weight_records(package.manifest()).empty()) return;
  may_change(package) ? copy(package) : map(package);
}

WeightMapping::~WeightMapping() {
  if (file_) {
    const Work work;
    const std::unique_lock lock(mapped_files().mutex);
    mapped_files().files.erase(static_cast<const char*>(memory_));
  }
  if (memory_ != nullptr) munmap(memory_, size_);
}

void WeightMapping::map(const PackageReader& package) {
  size_ = package.size();
  // Read-only: code that writes to a weight crashes instead of changing it for others.
  // Sealed memory cannot be mapped as shared before Linux 6.7; the pages of a private mapping are the same ones.
  Descriptor file(fcntl(package.fd(), F_DUPFD_CLOEXEC, 0));  // the package may be closed before
  if (!file) throw FileError(package.place());
  const int sharing = is_sealed(package.fd()) ? MAP_PRIVATE : MAP_SHARED;
  void* mapped = mmap(nullptr, size_, PROT_READ, sharing, package.fd(), 0);
  if (mapped == MAP_FAILED) throw FileError(package.place());
  memory_ = mapped;
  for (const std::string& record : weight_records(package.manifest())) {
    data_[record] = static_cast<const char*>(memory_) + package.data_offset(record);
  }
  const Work work;
  const std::unique_lock lock(mapped_files().mutex);
  mapped_files().files.emplace(static_cast<const char*>(memory_), MappedFiles::File{size_, file.get()});
  file_ = std::move(file);
}

void WeightMapping::copy(const PackageReader& package) {
  const std::set<std::string> records = weight_records(package.manifest());
  for (const std::string& record : records) size_ += padded(package.record(record));
  if (size_ == 0) size_ = kAlignment;
  void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw FileError(package.place());
  memory_ = mapped;
  auto* at = static_cast<char*>(memory_);
  for (const std::string& record : records) {
    package.read(record, at);
    data_[record] = at;
    at += padded(package.record(record));
  }
  if (mprotect(memory_, size_, PROT_READ) != 0) throw FileError(package.place());
}

const char* WeightMapping::data(std::string_view record) const {
  const auto found = data_.find(std::string(record));
  return found == data_.end() ? nullptr : found->second;
}

void read_weights(const char* from, char* to, size_t bytes) {
  std::shared_lock lock(mapped_files().mutex);
  auto next = mapped_files().files.upper_bound(from);
  if (next == mapped_files().files.begin() || from >= (--next)->first + next->second.size) {
    std::memcpy(to, from, bytes);
    return;
  }
  const auto offset = static_cast<uint64_t>(from - next->first);
  const int fd = next->second.fd;
  lock.unlock();  // the weights that the caller has keep the file open
  if (read_at(fd, offset, to, bytes) == bytes) return;
  throw Error(errors::kDigestMismatch, "a package became shorter while its weights were loaded",
              "To replace a package, write the new one under another name and rename it.");
}

}  // namespace exportkit
