#include "package/mapping.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include <set>

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
// no read lease. False if this process may not ask, or the file system has no leases.
bool is_open_for_writing(int fd) {
  // If the file is opened for writing during the lease, the kernel sends this process a signal, which it ignores.
  fcntl(fd, F_SETSIG, SIGURG);
  if (fcntl(fd, F_SETLEASE, F_RDLCK) != 0) return errno == EAGAIN;
  fcntl(fd, F_SETLEASE, F_UNLCK);
  return false;
}

}  // namespace

WeightMapping::WeightMapping(const PackageReader& package) {
  if (weight_records(package.manifest()).empty()) return;
  copied_ = others_may_change(package.status()) != nullptr || is_open_for_writing(package.fd());
  copied_ ? copy(package) : map(package);
}

WeightMapping::~WeightMapping() {
  if (memory_ != nullptr) munmap(memory_, size_);
}

void WeightMapping::map(const PackageReader& package) {
  size_ = package.size();
  // Read-only: code that writes to a weight crashes instead of changing it for others.
  void* mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, package.fd(), 0);
  if (mapped == MAP_FAILED) throw FileError(package.path());
  memory_ = mapped;
  for (const std::string& record : weight_records(package.manifest())) {
    data_[record] = static_cast<const char*>(memory_) + package.data_offset(record);
  }
}

void WeightMapping::copy(const PackageReader& package) {
  const std::set<std::string> records = weight_records(package.manifest());
  for (const std::string& record : records) size_ += padded(package.record(record));
  if (size_ == 0) size_ = kAlignment;
  void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw FileError(package.path());
  memory_ = mapped;
  auto* at = static_cast<char*>(memory_);
  try {
    for (const std::string& record : records) {
      package.read(record, at);
      data_[record] = at;
      at += padded(package.record(record));
    }
    if (mprotect(memory_, size_, PROT_READ) != 0) throw FileError(package.path());
  } catch (...) {
    munmap(memory_, size_);
    throw;
  }
}

const char* WeightMapping::data(std::string_view record) const {
  const auto found = data_.find(std::string(record));
  return found == data_.end() ? nullptr : found->second;
}

}  // namespace exportkit
