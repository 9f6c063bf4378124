#include "package/reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "package/consistency.h"
#include "package/digests.h"
#include "package/errors.h"
#include "package/in_threads.h"
#include "package/record_rules.h"
#include "package/text.h"

namespace exportkit {

namespace {

constexpr const char* kDamaged = "The package was changed or damaged after it was written. Get it again.";

}  // namespace

PackageReader::PackageReader(OpenedFile file, const SignatureRequest* request)
    : PackageFile(std::move(file)),
      signers_(request ? check_trust(*this, *request) : std::vector<PublicKey>()),
      manifest_(decode_manifest(manifest_text())) {
  check_consistency(manifest_);
  check_listed(manifest_.records, entries());
}

const Record& PackageReader::record(std::string_view name) const { return manifest_.records[index(name)]; }

uint64_t PackageReader::data_offset(std::string_view name) const { return entries()[index(name)].data_offset; }

std::string PackageReader::read(std::string_view name) const {
  std::string content(entries()[index(name)].size, '\0');
  read(name, content.data());
  return content;
}

void PackageReader::read(std::string_view name, char* buffer) const {
  blocks(name, [&buffer](std::string_view block) { buffer = std::copy(block.begin(), block.end(), buffer); });
}

void PackageReader::extract(std::string_view name, const std::filesystem::path& destination, mode_t mode) const {
  const size_t at = index(name);
  WrittenWhole file(destination, mode);
  blocks(at, [&](std::string_view block) { file.write(block); });
  file.finish();
}

void PackageReader::blocks(std::string_view name, const Sink& sink) const { blocks(index(name), sink); }

void PackageReader::verify() const {
  in_threads(entries().size(), size(), [this](size_t i) { blocks(i, [](std::string_view) {}); });
  if (layer() && sha256() != layer()->sha256) {
    throw Error(errors::kDigestMismatch, path().string() + " has another digest than its name, " + sha256(),
                "The layout was changed or damaged after it was written. Get it again.");
  }
}

void PackageReader::check_unchanged() const {
  const FileState now = FileState::of(status());
  if (now.size == opened().size && now.mtime_ns == opened().mtime_ns) {
    if (now.ctime_ns == opened().ctime_ns) return;
    // Either the name or mode changed, which is harmless, or a time was set back to hide a write.
    return verify();
  }
  throw Error(errors::kDigestMismatch, name() + " was written to while it was open",
              "To replace a package, write the new one under another name and rename it.");
}

// A record's index in the entries and in the manifest's records, which have the same order.
size_t PackageReader::index(std::string_view name) const {
  const auto found = std::lower_bound(entries().begin(), entries().end(), name,
                                      [](const Entry& entry, std::string_view wanted) { return entry.name < wanted; });
  if (found == entries().end() || found->name != name) {
    throw Error(errors::kMissingRecord, this->name() + " has no record " + shown(name));
  }
  return static_cast<size_t>(found - entries().begin());
}

void PackageReader::blocks(size_t index, const Sink& sink) const {
  const Entry& entry = entries()[index];
  const Record& record = manifest_.records[index];
  Sha256 digest;
  uint32_t crc = 0;
  read_blocks(fd(), entry.data_offset, entry.size, [&](std::string_view block) {
    digest.update(block.data(), block.size());
    crc = crc32(crc, block.data(), block.size());
    sink(block);
  });
  if (const std::string sha256 = digest.hex(); sha256 != record.sha256) {
    throw Error(errors::kDigestMismatch,
                "record " + record.name + " has sha256 " + sha256 + "; the manifest says " + record.sha256, kDamaged);
  }
  if (crc != entry.crc32) {  // the only checksum that torch's reader checks
    throw Error(errors::kDigestMismatch,
                "record " + record.name + " has a CRC-32 that differs from the archive's directory", kDamaged);
  }
}

}  // namespace exportkit
