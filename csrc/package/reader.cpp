#include "package/reader.h"

#include <time.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "package/consistency.h"
#include "package/digests.h"
#include "package/errors.h"
#include "package/in_threads.h"
#include "package/text.h"
#include "package/trust.h"

namespace exportkit {

namespace {

constexpr const char* kDamaged = "The package was changed or damaged after it was written. Get it again.";

int64_t nanoseconds(const timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; }

void check_has_manifest(const std::vector<Header>& headers) {
  const auto has = [&](std::string_view name) {
    const std::string ending = concat("/", name);
    return std::ranges::any_of(headers, [&](const Header& header) { return header.name.ends_with(ending); });
  };
  if (has(kManifestName)) return;
  const std::string none = "the archive has no " + std::string(kManifestName) + ": it is ";
  if (has("constants.pkl")) {
    throw Error(errors::kNoManifest, none + "TorchScript",
                "Export the module that it was made of: `exportkit export FILE.py:CLASS`.");
  }
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

// The manifest comes first, then the records sorted by name. Names lack the root.
void check_record_order(const std::vector<Entry>& entries) {
  const bool first = entries[0].name == kManifestName;
  const auto found = std::ranges::is_sorted_until(entries.begin() + 1, entries.end(), {}, &Entry::name);
  if (first && found == entries.end()) return;
  throw Error(errors::kArchiveLayout,
              "record " + (first ? found->name : entries[0].name) +
                  " is out of place: the manifest comes first, then the records sorted by name");
}

std::string read_manifest(int fd, const Entry& entry) {
  check_manifest_size(entry.size);
  std::string text = read_at(fd, entry.data_offset, entry.size);
  if (crc32(0, text.data(), text.size()) == entry.crc32) return text;
  throw Error(errors::kDigestMismatch, concat(kManifestName, " has a CRC-32 that differs from the archive's directory"),
              kDamaged);
}

// --- the rules of records --------------------------------------------------------------------------------------------

constexpr size_t kMaxNameLength = 512;

bool is_safe(std::string_view name) {
  constexpr std::string_view kMarks = "/_.+=@-";
  const auto allowed = [&](char c) { return is_alnum(c) || kMarks.find(c) != std::string_view::npos; };
  if (name.size() > kMaxNameLength || !std::ranges::all_of(name, allowed)) return false;
  for (;;) {
    const size_t slash = name.find('/');
    if (name.substr(0, slash).find_first_not_of('.') == std::string_view::npos) return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

}  // namespace

FileState FileState::of(const struct stat& status) {
  return {static_cast<int64_t>(status.st_dev), static_cast<int64_t>(status.st_ino), status.st_size,
          nanoseconds(status.st_mtim), nanoseconds(status.st_ctim)};
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

void check_record_names(const std::vector<std::string_view>& names) {
  std::set<std::string_view> seen;
  for (const std::string_view name : names) {
    if (!is_safe(name)) {
      throw Error(errors::kUnsafeRecordName, concat("record name ", Quoted{name},
                                                    " is not allowed: names are relative paths; each part has letters, "
                                                    "digits and _.+=@-, and not only dots"));
    }
    if (!seen.insert(name).second) {
      throw Error(errors::kDuplicateRecord, "two records have the name " + std::string(name));
    }
  }
  for (const std::string_view folder : seen) {
    const std::string inside = concat(folder, "/");
    const auto name = seen.lower_bound(inside);
    if (name != seen.end() && name->starts_with(inside)) {
      throw Error(errors::kUnsafeRecordName, concat(folder, " is both a record and a folder of the record ", *name));
    }
  }
  for (const std::string_view name : names) {
    if (name.starts_with(kRoot)) continue;
    throw Error(errors::kArchiveLayout,
                concat("record ", name, " is not under ", kRoot, ", the root folder of every package"));
  }
}

void check_listed(const std::vector<Record>& records, std::span<const Entry> entries) {
  std::vector<std::string_view> listed, present, missing, unlisted;
  for (const Record& record : records) listed.push_back(record.name);
  for (const Entry& entry : entries) present.push_back(entry.name);
  std::set_difference(listed.begin(), listed.end(), present.begin(), present.end(), std::back_inserter(missing));
  std::set_difference(present.begin(), present.end(), listed.begin(), listed.end(), std::back_inserter(unlisted));
  const auto refuse = [](ErrorClass kind, const char* problem, const std::vector<std::string_view>& names) {
    if (!names.empty()) throw Error(kind, problem + some(names, 5, shown));
  };
  refuse(errors::kMissingRecord, "the manifest lists records that the archive does not have: ", missing);
  refuse(errors::kUnlistedRecord, "the archive has records that the manifest does not list: ", unlisted);
  for (size_t i = 0; i < entries.size(); ++i) {
    const Record& record = records[i];
    if (entries[i].size == static_cast<uint64_t>(record.size)) continue;
    throw Error(errors::kDigestMismatch,
                concat("record ", record.name, " has ", entries[i].size, " bytes; the manifest says ", record.size));
  }
  for (const StockRecord& stock : kStockRecords) {
    const auto is_it = [&](const Record& record) {
      return record.name == stock.name && static_cast<size_t>(record.size) == stock.content.size() &&
             record.sha256 == sha256_hex(stock.content);
    };
    if (std::ranges::any_of(records, is_it)) continue;
    throw Error(errors::kStockRecord,
                concat("record ", stock.name, " must exist and contain `", stock.text, "`: torch looks for it first"));
  }
}

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
  const auto found = std::ranges::lower_bound(entries(), name, {}, &Entry::name);
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
