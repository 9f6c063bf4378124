// An open file with the layout of a package. Its manifest is not yet parsed or trusted.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "package/atomic.h"
#include "package/container.h"
#include "package/opened_file.h"

namespace exportkit {

// The state of a file at one moment.
struct FileState {
  uint64_t device, inode;
  int64_t size, mtime_ns, ctime_ns;

  static FileState of(const struct stat& status);
  auto operator<=>(const FileState&) const = default;
  // The later of the two times.
  int64_t changed_ns() const { return mtime_ns > ctime_ns ? mtime_ns : ctime_ns; }
};

// The file is opened once, so what was checked is what is read, even if the path names another file by then.
class PackageFile {
 public:
  // Takes over a file and checks rules 1 to 6. Throws the error class of the broken rule.
  explicit PackageFile(OpenedFile file);
  PackageFile(const PackageFile&) = delete;
  PackageFile& operator=(const PackageFile&) = delete;

  // Empty if it was not opened by a path. Then no other file belongs to it, such as a signature.
  const std::filesystem::path& path() const { return opened_file_.path; }
  // The file's name, or what was given instead of a path, for messages.
  const std::string& name() const { return opened_file_.name; }
  // The path, or else the name.
  std::filesystem::path place() const { return path().empty() ? std::filesystem::path(name()) : path(); }
  // `/proc/self/fd/<n>` is the file that was checked.
  int fd() const { return opened_file_.file.get(); }
  uint64_t size() const { return static_cast<uint64_t>(opened_.size); }
  // What an OCI image layout says of it, if it is in one.
  const std::optional<PackageLayer>& layer() const { return opened_file_.layer; }
  // What the file was when it was opened, and what it is now.
  const FileState& opened() const { return opened_; }
  struct stat status() const;

  // The manifest's bytes; only their number is checked.
  const std::string& manifest_text() const { return manifest_; }
  // Hex digest of the manifest. It identifies the package's content, because the manifest has every record's digest.
  const std::string& manifest_sha256() const { return manifest_sha256_; }
  // Hex digest of the whole file, which the first call reads.
  const std::string& sha256() const;

 protected:
  ~PackageFile() = default;

  // The records without the root folder and the manifest, sorted by name.
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  void read_structure();

  OpenedFile opened_file_;
  FileState opened_;
  std::vector<Entry> entries_;
  std::string manifest_, manifest_sha256_;
  mutable std::once_flag whole_digest_;
  mutable std::string sha256_;
};

}  // namespace exportkit
