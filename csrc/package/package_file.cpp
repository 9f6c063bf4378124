#include "package/package_file.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "package/digests.h"
#include "package/errors.h"
#include "package/manifest.h"
#include "package/record_rules.h"

namespace exportkit {
namespace {

int64_t nanoseconds(const timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; }

void check_has_manifest(const std::vector<Header>& headers) {
  const auto has = [&](std::string_view name) {
    const std::string ending = "/" + std::string(name);
    return std::any_of(headers.begin(), headers.end(), [&](const Header& h) { return h.name.ends_with(ending); });
  };
  if (has(kManifestName)) return;
  const std::string none = "the archive has no " + std::string(kManifestName) + ": it is ";
  if (has("data.pkl")) {
    throw Error(
        errors::kNoManifest, none + "a checkpoint, as torch.save writes it",
        "It has weights, and not the model's code: `exportkit export FILE.py:CLASS --weights WEIGHTS.safetensors`.");
  }
  if (has("archive_format")) {
    throw Error(errors::kNoManifest, none + "a .pt2 that torch wrote, not exportkit",
                "`exportkit export` makes a package of a model; MODEL may be an ExportedProgram .pt2.");
  }
  throw Error(errors::kNoManifest, none + "a zip archive but not a package");
}

std::string read_manifest(int fd, const Entry& entry) {
  check_manifest_size(entry.size);
  std::string text = read_at(fd, entry.data_offset, entry.size);
  if (crc32(0, text.data(), text.size()) != entry.crc32) {
    throw Error(errors::kDigestMismatch,
                std::string(kManifestName) + " has a CRC-32 that differs from the archive's directory",
                "The package was changed or damaged after it was written. Get it again.");
  }
  return text;
}

}  // namespace

FileState FileState::of(const struct stat& status) {
  return {status.st_dev, status.st_ino, status.st_size, nanoseconds(status.st_mtim), nanoseconds(status.st_ctim)};
}

PackageFile::PackageFile(OpenedFile file) : opened_file_(std::move(file)) {
  const struct stat now = status();
  if (!S_ISREG(now.st_mode)) {
    throw Error(errors::kNotAnArchive, place().string() + " is not a file; a package is one .pt2 file");
  }
  opened_ = FileState::of(now);
  try {
    read_structure();
  } catch (const Error& error) {
    if (!path().empty()) throw;  // who gave a path knows which file it is
    throw Error(error.kind(), name() + ": " + error.message(), error.hint());
  }
}

void PackageFile::read_structure() {
  if (path().extension() == ".onnx" && read_at(fd(), 0, 4) != "PK\3\4") {
    throw Error(errors::kNotAnArchive, path().string() + " is an ONNX model, not a package",
                "ONNX Runtime runs it without exportkit. `exportkit verify`, `inspect`, `sign` and `bench` take it.");
  }
  const std::vector<Header> headers = read_directory(fd(), size());
  check_has_manifest(headers);
  std::vector<std::string_view> names;
  for (const Header& header : headers) names.push_back(header.name);
  check_record_names(names);
  entries_ = check_layout(fd(), size(), headers);
  for (Entry& entry : entries_) entry.name.erase(0, kRoot.size());
  check_record_order(entries_);
  manifest_ = read_manifest(fd(), entries_[0]);
  manifest_sha256_ = sha256_hex(manifest_);
  entries_.erase(entries_.begin());
}

struct stat PackageFile::status() const {
  struct stat status{};
  if (fstat(fd(), &status) != 0) throw FileError(place());
  return status;
}

const std::string& PackageFile::sha256() const {
  std::call_once(whole_digest_, [this] {
    Sha256 digest;
    read_blocks(fd(), 0, size(), [&](std::string_view block) { digest.update(block.data(), block.size()); });
    sha256_ = digest.hex();
  });
  return sha256_;
}

}  // namespace exportkit
