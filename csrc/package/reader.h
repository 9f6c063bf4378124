// Opening and checking a package. FORMAT.md numbers the rules.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "package/container.h"
#include "package/keys.h"
#include "package/manifest.h"
#include "package/opened_file.h"

namespace exportkit {

// torch takes the first record's folder for the archive's root. Every package has the same root, so that its bytes do
// not depend on the file's name, which torch's writer uses as the root.
inline constexpr std::string_view kRoot = "package/";

// Records that torch's writer adds to every archive and its readers look for. `.data/version` is the version of the zip
// layout, not of the package; torch reads 1 to 10.
struct StockRecord {
  std::string_view name, content, text;
};
inline constexpr StockRecord kStockRecords[] = {{".data/version", "6\n", "6\\n"},
                                                {"archive_format", "pt2", "pt2"},
                                                {"archive_version", "0", "0"},
                                                {"byteorder", "little", "little"}};

// Checks that every name is unique, lies under the root and can be extracted safely: UnsafeRecordNameError,
// DuplicateRecordError, ArchiveLayoutError.
void check_record_names(const std::vector<std::string_view>& names);

// Checks that the manifest lists exactly the archive's records with their sizes. Both lists are sorted.
// MissingRecordError, UnlistedRecordError, DigestMismatchError, StockRecordError.
void check_listed(const std::vector<Record>& listed, std::span<const Entry> entries);

// The state of a file at one moment.
struct FileState {
  int64_t device, inode, size, mtime_ns, ctime_ns;

  static FileState of(const struct stat& status);
  auto operator<=>(const FileState&) const = default;
  // The later of the two times.
  int64_t changed_ns() const { return mtime_ns > ctime_ns ? mtime_ns : ctime_ns; }
};

// An open file with the layout of a package. Its manifest is not yet parsed or trusted.
//
// Opens a file once. What it checked is what it reads, even if the path then names another file.
class PackageFile {
 public:
  // Takes over a file and checks rules 1 to 6. Throws the error class of the broken rule.
  explicit PackageFile(OpenedFile file);
  PackageFile(const PackageFile&) = delete;
  PackageFile& operator=(const PackageFile&) = delete;

  // Empty if it was not opened by a path. Then no other file belongs to it, such as a signature.
  const std::filesystem::path& path() const { return opened_file_.path; }
  // The name that messages use: the file's, or what the caller gave in place of a path.
  const std::string& name() const { return opened_file_.name; }
  // The path, or else the name.
  std::filesystem::path place() const { return path().empty() ? std::filesystem::path(name()) : path(); }
  // `/proc/self/fd/<n>` is the file that was checked.
  int fd() const { return opened_file_.file.get(); }
  uint64_t size() const { return static_cast<uint64_t>(opened_.size); }
  // What an OCI image layout says of it, if it is in one.
  const std::optional<PackageLayer>& layer() const { return opened_file_.layer; }
  // The file's state when it was opened, and now.
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

struct SignatureRequest;

// An open package with a checked structure. `read` and `extract` check contents. Several threads may use it.
class PackageReader : public PackageFile {
 public:
  // Checks everything of a package except the records' contents (rules 1 to 12). If a signature is required, it is
  // checked before the manifest is read. Throws the error class of the broken rule, or the errors of check_trust.
  explicit PackageReader(OpenedFile file, const SignatureRequest* request = nullptr);

  const Manifest& manifest() const { return manifest_; }
  // The keys that signed it, if a signature was required when it was opened.
  const std::vector<PublicKey>& signers() const { return signers_; }

  // The manifest's entry for a record: MissingRecordError.
  const Record& record(std::string_view name) const;
  // The offset of a record's content in the file: MissingRecordError.
  uint64_t data_offset(std::string_view name) const;
  // Reads a record's content and checks its digest each time: MissingRecordError, DigestMismatchError. The buffer must
  // have room for the whole record.
  std::string read(std::string_view name) const;
  void read(std::string_view name, char* buffer) const;
  // Writes a record to a file, which has a temporary name until its digest is checked. Does not wait for the disk.
  // MissingRecordError, DigestMismatchError; std::system_error if it cannot be written.
  void extract(std::string_view name, const std::filesystem::path& destination, mode_t mode = 0600) const;
  // Passes a record's content to `sink` in blocks. Throws for a wrong digest after the last block.
  using Sink = std::function<void(std::string_view)>;
  void blocks(std::string_view name, const Sink& sink) const;
  // Checks every record's digest (rule 13), and the file's if an OCI image layout names it: DigestMismatchError.
  void verify() const;
  // Checks that the open file was not written to since it was opened: DigestMismatchError.
  void check_unchanged() const;

 private:
  size_t index(std::string_view name) const;
  void blocks(size_t index, const Sink& sink) const;

  std::vector<PublicKey> signers_;
  Manifest manifest_;  // records have the order of entries()
};

}  // namespace exportkit
