#include "package/writer.h"

#include <fcntl.h>

#include <limits>

#include "package/consistency.h"
#include "package/digests.h"
#include "package/errors.h"
#include "package/in_threads.h"
#include "package/reader.h"

namespace exportkit {
namespace {

constexpr std::string_view kDropped = ".data/serialization_id";  // a hash of the other records, which torch only logs

// Copies a content into the file and checks that it is still the content that was measured.
void copy(const PackageWriter::Content& content, const Entry& entry, WrittenWhole& file) {
  uint64_t size = 0;
  uint32_t crc = 0;
  content([&](std::string_view block) {
    size += block.size();
    crc = crc32(crc, block.data(), block.size());
    file.write(block);
  });
  if (size != entry.size || crc != entry.crc32) {
    throw Error(errors::kExportkit, entry.name + " changed while it was being packed",
                "Pack again when nothing writes to it any more.");
  }
}

}  // namespace

PackageWriter::Content file_content(const std::filesystem::path& path) {
  return [path](const PackageWriter::Sink& sink) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) throw FileError(path);
    read_blocks(file.get(), 0, std::numeric_limits<int64_t>::max(), sink);
  };
}

void PackageWriter::add(const std::string& name, Content content) {
  if (name == kManifestName) {
    throw Error(errors::kDuplicateRecord, name + " is the manifest's name; a record cannot have it");
  }
  if (name != kDropped) contents_.insert_or_assign(name, std::move(content));
}

std::vector<Record> PackageWriter::records() {
  if (measured_.empty()) measure();
  std::vector<Record> records;
  for (const Measured& measured : measured_) records.push_back(measured.record);
  return records;
}

void PackageWriter::measure() {
  for (const StockRecord& stock : kStockRecords) {
    add(std::string(stock.name), [&stock](const Sink& sink) { sink(stock.content); });
  }
  std::vector<std::string> names;
  for (const auto& [name, content] : contents_) names.push_back(std::string(kRoot) + name);
  check_record_names({names.begin(), names.end()});
  std::vector<Measured> all;
  std::vector<const Content*> contents;
  for (const auto& [name, content] : contents_) {
    all.push_back({{name, 0, {}}, 0});
    contents.push_back(&content);
  }
  // How much there is to read is not known yet.
  in_threads(contents.size(), kWorthThreads, [&](size_t i) {
    Measured& measured = all[i];
    Sha256 digest;
    (*contents[i])([&](std::string_view block) {
      measured.record.size += static_cast<int64_t>(block.size());
      measured.crc32 = crc32(measured.crc32, block.data(), block.size());
      digest.update(block.data(), block.size());
    });
    measured.record.sha256 = digest.hex();
  });
  measured_ = std::move(all);
}

void PackageWriter::finish(const std::filesystem::path& path, const std::string& text) {
  if (measured_.empty()) measure();
  check_manifest_size(text.size());
  const Manifest manifest = decode_manifest(text);
  check_consistency(manifest);
  // The manifest comes first, so that it can be read from the first few kilobytes.
  std::vector<Entry> entries{
      laid_out(std::string(kRoot) + std::string(kManifestName), text.size(), crc32(0, text.data(), text.size()), 0)};
  for (const Measured& measured : measured_) {
    entries.push_back(laid_out(std::string(kRoot) + measured.record.name, static_cast<uint64_t>(measured.record.size),
                               measured.crc32, entries.back().end()));
  }
  std::vector<Entry> listed(entries.begin() + 1, entries.end());
  for (Entry& entry : listed) entry.name.erase(0, kRoot.size());
  check_listed(manifest.records, listed);
  const std::string directory = central_directory(entries);
  WrittenWhole file(path, 0666);
  file.reserve(entries.back().end() + directory.size());
  file.write(local_header(entries[0]));
  file.write(text);
  auto content = contents_.begin();
  for (size_t i = 1; i < entries.size(); ++i, ++content) {
    file.write(local_header(entries[i]));
    copy(content->second, entries[i], file);
  }
  file.write(directory);
  file.finish(/*durable=*/true);
}

}  // namespace exportkit
