// Opening and checking a package. FORMAT.md numbers the rules.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "package/manifest.h"
#include "package/package_file.h"
#include "package/trust.h"

namespace exportkit {

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
