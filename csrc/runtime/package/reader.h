// Opening and checking a package: the twin of exportkit.package.archive.PackageReader, with the same verdict on every
// file. FORMAT.md numbers the rules.
#pragma once

#include <sys/types.h>
#include <time.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/package/container.h"
#include "runtime/package/manifest.h"

namespace exportkit {

// An open package whose structure holds; what `read` and `extract` give holds as well. The file is opened once: what
// was checked is what is read, whatever the path names by then. Usable from several threads.
class PackageReader {
 public:
  // Opens a package and checks everything but the records' contents (rules 1 to 12). UsageError: there is no such
  // file, or it may not be read. Else the error class of the rule that is broken.
  explicit PackageReader(const std::filesystem::path& path);
  ~PackageReader();
  PackageReader(const PackageReader&) = delete;
  PackageReader& operator=(const PackageReader&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  // Of the file, in bytes.
  uint64_t size() const { return size_; }
  // The open file: `/proc/self/fd/<n>` is the file that was checked.
  int fd() const { return fd_; }
  // Hex digest of the manifest, which has every other record's: it identifies the content of the package.
  const std::string& manifest_sha256() const { return manifest_sha256_; }
  // Hex digest of the whole file, read when first asked for.
  const std::string& sha256() const;

  // What the manifest says of a record: MissingRecordError.
  const Record& record(std::string_view name) const;
  // Where in the file a record's content starts: MissingRecordError.
  uint64_t data_offset(std::string_view name) const;
  // A record's content, its digest checked each time: MissingRecordError, DigestMismatchError.
  std::string read(std::string_view name) const;
  // Writes a record to a file, which appears only if its digest holds, under a temporary name until then. The disk is
  // not waited for. MissingRecordError, DigestMismatchError; std::system_error where it cannot be written.
  void extract(std::string_view name, const std::filesystem::path& destination, mode_t mode = 0600) const;
  // Checks every record's digest (rule 13): DigestMismatchError.
  void verify() const;
  // Finds out whether somebody wrote into the open file since: DigestMismatchError.
  void check_unchanged() const;

 private:
  using Sink = std::function<void(std::string_view)>;

  size_t index(std::string_view name) const;
  void check_records();
  // Passes a record's content on in blocks; the error for a wrong digest comes after the last.
  void blocks(size_t index, const Sink& sink) const;

  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t size_ = 0;
  timespec modified_{};
  Manifest manifest_;
  std::string manifest_sha256_;
  std::vector<Entry> entries_;  // one for each of the manifest's records, in their order
  mutable std::once_flag whole_digest_;
  mutable std::string sha256_;
};

}  // namespace exportkit
