// What a package is read from: a file by its name, an open file, or memory that nobody can change.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "package/atomic.h"

namespace exportkit {

// How many bytes of a stream are taken, unless its reader says otherwise: a stream may never end.
inline constexpr uint64_t kStreamLimit = uint64_t{8} << 30;

// Whether a file is memory that nobody can change any more, whoever has it open: a memfd that is sealed.
bool is_sealed(int fd);

// What an OCI image layout says of a package that is one of its blobs.
struct PackageLayer {
  std::string sha256;                             // of the blob
  std::map<std::string, std::string> signatures;  // the contents of signature files, by their suffixes
};

// An open file, which is read by offset.
struct OpenedFile {
  Descriptor file;
  std::filesystem::path path;              // empty if it was not opened by a path
  std::string name;                        // for messages: the path's last part, or what was given
  std::optional<PackageLayer> layer = {};  // nothing lies beside a blob, so all that belongs to it is here

  // Opens a file, or the package in a folder, of which open_package_folder says the errors. UsageError: the path does
  // not exist or cannot be read.
  static OpenedFile by_path(const std::filesystem::path& path);
  // The file of a descriptor, which stays the caller's and whose position does not matter. UsageError: it is not open
  // for reading. NotAnArchiveError: it is no file, but a folder, a device, a pipe or a socket.
  static OpenedFile of_file(int descriptor);
  // The same, or what comes out of a pipe or a socket until its end, of which there is one copy: `ArrivingPackage`.
  static OpenedFile of_descriptor(int descriptor, uint64_t stream_limit = kStreamLimit);
  // A copy of these bytes. What is checked is the copy, so nobody can change it afterwards. Errors: `ArrivingPackage`.
  static OpenedFile of_bytes(std::string_view bytes);
};

// A package that comes in pieces: one copy in memory, which is sealed before anything of it is checked.
class ArrivingPackage {
 public:
  // `name` says in messages what was given. HostError: the system gives no such memory.
  ArrivingPackage(std::string name, uint64_t limit);

  // UsageError: more than the limit, or memory that cannot be read. FileError: there is no room.
  void write(std::string_view piece);
  // Nobody can write to it from now on. HostError: somebody has it open for writing, through /proc.
  OpenedFile seal() &&;

 private:
  std::string name_;
  uint64_t limit_, size_ = 0;
  Descriptor file_;
};

// The suffixes of signature files: of our own form, and of OpenSSF model signing's bundles.
inline constexpr const char *kOwnSuffix = ".sig", *kBundleSuffix = ".sigstore.json";

// Opens the package in a folder. Nothing in the folder names another place: links are refused, and the names of blobs
// are their digests. FORMAT.md, "Folders", has the rules.
//
// UsageError: there is no package, or more than one. ArtifactError: the layout breaks a rule. DigestMismatchError: a
// blob is not what its descriptor says; the package's own digest is checked with those of its records.
OpenedFile open_in_folder(const std::filesystem::path& path);

}  // namespace exportkit
