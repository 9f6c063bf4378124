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

// An open package whose structure holds; what `read` and `extract` give holds as well. Usable from several threads.
class PackageReader : public PackageFile {
 public:
  // Opens a package and checks everything but the records' contents (rules 1 to 12). Where a signature is asked for, it
  // is checked before the manifest is read. UsageError: there is no such file, or it may not be read. Else the error
  // class of the rule that is broken, or those of check_trust.
  explicit PackageReader(const std::filesystem::path& path, const SignatureRequest* request = nullptr);

  const Manifest& manifest() const { return manifest_; }
  // Who signed it, where somebody asked for that when it was opened.
  const std::vector<PublicKey>& signers() const { return signers_; }

  // What the manifest says of a record: MissingRecordError.
  const Record& record(std::string_view name) const;
  // Where in the file a record's content starts: MissingRecordError.
  uint64_t data_offset(std::string_view name) const;
  // A record's content, its digest checked each time: MissingRecordError, DigestMismatchError. The buffer has room for
  // its size.
  std::string read(std::string_view name) const;
  void read(std::string_view name, char* buffer) const;
  // Writes a record to a file, which appears only if its digest holds, under a temporary name until then. The disk is
  // not waited for. MissingRecordError, DigestMismatchError; std::system_error where it cannot be written.
  void extract(std::string_view name, const std::filesystem::path& destination, mode_t mode = 0600) const;
  // Passes a record's content on in blocks; the error for a wrong digest comes after the last.
  using Sink = std::function<void(std::string_view)>;
  void blocks(std::string_view name, const Sink& sink) const;
  // Checks every record's digest (rule 13): DigestMismatchError.
  void verify() const;
  // Finds out whether somebody wrote into the open file since: DigestMismatchError.
  void check_unchanged() const;

 private:
  size_t index(std::string_view name) const;
  void blocks(size_t index, const Sink& sink) const;

  std::vector<PublicKey> signers_;
  Manifest manifest_;  // its records are in the order of entries()
};

}  // namespace exportkit
