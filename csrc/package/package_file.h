// An open file that has the layout of a package, before anything that it says is believed.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "package/atomic.h"
#include "package/container.h"

namespace exportkit {

// What a file was when it was looked at.
struct FileState {
  uint64_t device, inode;
  int64_t size, mtime_ns, ctime_ns;

  static FileState of(const struct stat& status);
  auto operator<=>(const FileState&) const = default;
  // When it was last changed, by the later of both times.
  int64_t changed_ns() const { return mtime_ns > ctime_ns ? mtime_ns : ctime_ns; }
};

// The file is opened once: what was checked is what is read, whatever the path names by then.
class PackageFile {
 public:
  // Opens a file and checks rules 1 to 6. UsageError: there is no such file, or it may not be read. Else the error
  // class of the rule that is broken.
  explicit PackageFile(const std::filesystem::path& path);
  PackageFile(const PackageFile&) = delete;
  PackageFile& operator=(const PackageFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Its name, as messages have it.
  std::string name() const { return path_.filename().string(); }
  // `/proc/self/fd/<n>` is the file that was checked.
  int fd() const { return file_.get(); }
  uint64_t size() const { return static_cast<uint64_t>(opened_.size); }
  // What the file was when it was opened, and what it is now.
  const FileState& opened() const { return opened_; }
  struct stat status() const;

  // The manifest's bytes, of which nothing is known but that there are not too many.
  const std::string& manifest_text() const { return manifest_; }
  // Hex digest of them: the manifest has every other record's, so that it identifies the content of the package.
  const std::string& manifest_sha256() const { return manifest_sha256_; }
  // Hex digest of the whole file, read when first asked for.
  const std::string& sha256() const;

 protected:
  ~PackageFile() = default;

  // Of the records, without the root folder and the manifest, sorted by name.
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::filesystem::path path_;
  Descriptor file_;
  FileState opened_;
  std::vector<Entry> entries_;
  std::string manifest_, manifest_sha256_;
  mutable std::once_flag whole_digest_;
  mutable std::string sha256_;
};

}  // namespace exportkit
