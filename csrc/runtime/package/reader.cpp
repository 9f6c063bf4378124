#include "runtime/package/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <system_error>
#include <unordered_set>

#include "runtime/package/atomic.h"
#include "runtime/package/consistency.h"
#include "runtime/package/digest.h"
#include "runtime/package/errors.h"
#include "runtime/package/text.h"

namespace exportkit {

namespace {

constexpr std::string_view kRoot = "package/";
constexpr size_t kMaxNameLength = 512;
constexpr size_t kBlock = 256 << 10;  // stays in a core's own cache while it is hashed
constexpr const char* kDamaged = "The package was changed or damaged after it was written. Get it again.";

// What torch's readers look for first.
struct StockRecord {
  std::string_view name, content, text;
};
constexpr StockRecord kStockRecords[] = {{".data/version", "6\n", "6\\n"},
                                         {"archive_format", "pt2", "pt2"},
                                         {"archive_version", "0", "0"},
                                         {"byteorder", "little", "little"}};

int open_file(const std::filesystem::path& path) {
  // Non-blocking, or a FIFO would wait for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    throw Error(errors::kUsage, "cannot open " + path.string() + ": " + std::generic_category().message(errno));
  }
  return fd;
}

struct stat status_of(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  return status;
}

// --- rules on names ------------------------------------------------------------------------------------------------

void check_has_manifest(const std::vector<Header>& headers) {
  const auto has = [&](std::string_view name) {
    const std::string ending = "/" + std::string(name);
    return std::any_of(headers.begin(), headers.end(), [&](const Header& h) { return h.name.ends_with(ending); });
  };
  if (has(kManifestName)) return;
  const bool stock = has("archive_format");
  throw Error(errors::kNoManifest,
              "the archive has no " + std::string(kManifestName) + ": " +
                  (stock ? "a .pt2 that torch wrote, not exportkit" : "a zip archive, but no package"),
              stock ? "`exportkit export` makes a package of a model; MODEL may be an ExportedProgram .pt2." : "");
}

bool is_part(std::string_view part) {
  const auto allowed = [](char c) {
    return (c >= '0' && c <= '9') || (c >= '@' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || c == '.' ||
           c == '+' || c == '=' || c == '-';
  };
  return std::all_of(part.begin(), part.end(), allowed) && part.find_first_not_of('.') != std::string_view::npos;
}

bool is_safe(std::string_view name) {
  if (name.size() > kMaxNameLength) return false;
  for (;;) {
    const size_t slash = name.find('/');
    if (!is_part(name.substr(0, slash))) return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

// Every name is safe to extract under a folder, and each is there once.
void check_names(const std::vector<Header>& headers) {
  std::unordered_set<std::string_view> seen;
  for (const Header& header : headers) {
    if (!is_safe(header.name)) {
      throw Error(errors::kUnsafeRecordName,
                  "record name " + shown(header.name) +
                      " is not allowed: names are relative, of parts joined by `/`, each of letters, digits and "
                      "_.+=@- and more than dots");
    }
    if (!seen.insert(header.name).second) {
      throw Error(errors::kDuplicateRecord, "two records have the name " + header.name);
    }
  }
  std::vector<std::string_view> sorted(seen.begin(), seen.end());
  std::sort(sorted.begin(), sorted.end());
  std::string inside;
  for (const std::string_view folder : sorted) {
    inside.assign(folder).append("/");
    const auto name = std::lower_bound(sorted.begin(), sorted.end(), std::string_view(inside));
    if (name != sorted.end() && name->starts_with(inside)) {
      throw Error(errors::kUnsafeRecordName,
                  std::string(folder) + " is a record, and a folder of the record " + std::string(*name));
    }
  }
  for (const Header& header : headers) {
    if (!header.name.starts_with(kRoot)) {
      throw Error(errors::kArchiveLayout, "record " + header.name + " is not under " + std::string(kRoot) +
                                              ", the root folder of every package");
    }
  }
}

// The manifest comes first, and then the records sorted by name.
void check_order(const std::vector<Entry>& entries) {
  const auto out_of_place = [](const Entry& one, const Entry& next) { return one.name > next.name; };
  const bool first = entries[0].name == kManifestName;
  const auto found = std::adjacent_find(entries.begin() + 1, entries.end(), out_of_place);
  if (first && found == entries.end()) return;
  throw Error(errors::kArchiveLayout,
              "record " + (first ? std::next(found)->name : entries[0].name) +
                  " is out of place: the manifest comes first, and then the records sorted by name");
}

std::string read_manifest(int fd, const Entry& entry) {
  if (entry.size > kMaxManifestBytes) {
    throw Error(errors::kManifestTooLarge, "the manifest has " + std::to_string(entry.size) + " bytes; at most " +
                                               std::to_string(kMaxManifestBytes) + " are read");
  }
  std::string text = read_at(fd, entry.data_offset, entry.size);
  if (crc32(0, text.data(), text.size()) != entry.crc32) {
    throw Error(errors::kDigestMismatch,
                std::string(kManifestName) + " has another CRC-32 than the archive's directory says", kDamaged);
  }
  return text;
}

std::string some(const std::vector<std::string_view>& names) {
  constexpr size_t kShown = 5;
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) out += (i ? ", " : "") + shown(names[i]);
  return out + (names.size() > kShown ? " and " + std::to_string(names.size() - kShown) + " more" : "");
}

}  // namespace

PackageReader::PackageReader(const std::filesystem::path& path) : path_(path), fd_(open_file(path)) {
  try {
    const struct stat status = status_of(fd_);
    if (!S_ISREG(status.st_mode)) {
      throw Error(errors::kNotAnArchive, path.string() + " is not a file; a package is one .pt2 file");
    }
    size_ = static_cast<uint64_t>(status.st_size);
    modified_ = status.st_mtim;
    const std::vector<Header> headers = read_directory(fd_, size_);
    check_has_manifest(headers);
    check_names(headers);
    entries_ = check_layout(fd_, size_, headers);
    for (Entry& entry : entries_) entry.name.erase(0, kRoot.size());
    check_order(entries_);
    const std::string text = read_manifest(fd_, entries_[0]);
    entries_.erase(entries_.begin());
    manifest_ = decode_manifest(text);
    check_consistency(manifest_);
    check_records();
    manifest_sha256_ = sha256_hex(text);
  } catch (...) {
    close(fd_);
    throw;
  }
}

PackageReader::~PackageReader() { close(fd_); }

const std::string& PackageReader::sha256() const {
  std::call_once(whole_digest_, [this] {
    Sha256 digest;
    const auto buffer = std::make_unique<char[]>(kBlock);
    for (uint64_t at = 0; at < size_; at += kBlock) {
      digest.update(buffer.get(), read_at(fd_, at, buffer.get(), std::min<uint64_t>(kBlock, size_ - at)));
    }
    sha256_ = digest.hex();
  });
  return sha256_;
}

const Record& PackageReader::record(std::string_view name) const { return manifest_.records[index(name)]; }

uint64_t PackageReader::data_offset(std::string_view name) const { return entries_[index(name)].data_offset; }

std::string PackageReader::read(std::string_view name) const {
  const size_t at = index(name);
  std::string content;
  content.reserve(entries_[at].size);
  blocks(at, [&](std::string_view block) { content += block; });
  return content;
}

void PackageReader::extract(std::string_view name, const std::filesystem::path& destination, mode_t mode) const {
  const size_t at = index(name);
  WrittenWhole file(destination, mode);
  blocks(at, [&](std::string_view block) { file.write(block); });
  file.finish();
}

void PackageReader::verify() const {
  for (size_t i = 0; i < entries_.size(); ++i) blocks(i, [](std::string_view) {});
}

void PackageReader::check_unchanged() const {
  const struct stat status = status_of(fd_);
  const timespec now = status.st_mtim;
  if (static_cast<uint64_t>(status.st_size) != size_ || now.tv_sec != modified_.tv_sec ||
      now.tv_nsec != modified_.tv_nsec) {
    throw Error(errors::kDigestMismatch, path_.filename().string() + " was written to while it was open",
                "Put a new package in place by renaming it, so that nobody reads half of each.");
  }
}

// Of a record, among the entries and among the manifest's records, which are in the same order.
size_t PackageReader::index(std::string_view name) const {
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), name,
                                      [](const Entry& entry, std::string_view wanted) { return entry.name < wanted; });
  if (found == entries_.end() || found->name != name) {
    throw Error(errors::kMissingRecord, path_.filename().string() + " has no record " + shown(name));
  }
  return static_cast<size_t>(found - entries_.begin());
}

// Both are sorted: the archive's records were compared with their order, and the manifest's with theirs.
void PackageReader::check_records() {
  std::vector<std::string_view> listed, present, missing, unlisted;
  for (const Record& record : manifest_.records) listed.push_back(record.name);
  for (const Entry& entry : entries_) present.push_back(entry.name);
  std::set_difference(listed.begin(), listed.end(), present.begin(), present.end(), std::back_inserter(missing));
  std::set_difference(present.begin(), present.end(), listed.begin(), listed.end(), std::back_inserter(unlisted));
  if (!missing.empty()) {
    throw Error(errors::kMissingRecord, "the manifest lists records that the archive does not hold: " + some(missing));
  }
  if (!unlisted.empty()) {
    throw Error(errors::kUnlistedRecord,
                "the archive holds records that the manifest does not list: " + some(unlisted));
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Record& record = manifest_.records[i];
    if (entries_[i].size != static_cast<uint64_t>(record.size)) {
      throw Error(errors::kDigestMismatch, "record " + record.name + " has " + std::to_string(entries_[i].size) +
                                               " bytes; the manifest says " + std::to_string(record.size));
    }
  }
  for (const StockRecord& stock : kStockRecords) {
    const auto found = std::lower_bound(listed.begin(), listed.end(), stock.name);
    const auto says_so = [&](const Record& record) {
      return record.name == stock.name && static_cast<size_t>(record.size) == stock.content.size() &&
             record.sha256 == sha256_hex(stock.content);
    };
    if (found == listed.end() || !says_so(manifest_.records[static_cast<size_t>(found - listed.begin())])) {
      throw Error(errors::kStockRecord, "record " + std::string(stock.name) + " must be there and read `" +
                                            std::string(stock.text) + "`: torch looks for it first");
    }
  }
}

void PackageReader::blocks(size_t index, const Sink& sink) const {
  const Entry& entry = entries_[index];
  const Record& record = manifest_.records[index];
  const auto buffer = std::make_unique<char[]>(std::min<uint64_t>(kBlock, entry.size));
  Sha256 digest;
  uint32_t crc = 0;
  for (uint64_t at = 0; at < entry.size; at += kBlock) {
    const size_t count =
        read_at(fd_, entry.data_offset + at, buffer.get(), std::min<uint64_t>(kBlock, entry.size - at));
    digest.update(buffer.get(), count);
    crc = crc32(crc, buffer.get(), count);
    sink({buffer.get(), count});
  }
  if (const std::string sha256 = digest.hex(); sha256 != record.sha256) {
    throw Error(errors::kDigestMismatch,
                "record " + record.name + " has sha256 " + sha256 + "; the manifest says " + record.sha256, kDamaged);
  }
  if (crc != entry.crc32) {  // torch's reader looks at this one, and only at this one
    throw Error(errors::kDigestMismatch,
                "record " + record.name + " has another CRC-32 than the archive's directory says", kDamaged);
  }
}

}  // namespace exportkit
