// Writes a package atomically, in the only layout that its records can have.

#include <fcntl.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "package/c_api.h"
#include "package/consistency.h"
#include "package/digests.h"
#include "package/errors.h"
#include "package/in_threads.h"
#include "package/reader.h"
#include "package/text.h"

namespace exportkit {
namespace {

constexpr std::string_view kDropped = ".data/serialization_id";  // a hash of the other records, which torch only logs

using Sink = std::function<void(std::string_view)>;
// Passes a record's content to a sink in blocks.
using Content = std::function<void(const Sink&)>;

// Copies a content into the file and checks that it is still the content that was measured.
void copy(const Content& content, const Entry& entry, WrittenWhole& file) {
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

// Collects a package's records. Their sources must exist until the package is written.
class PackageWriter {
 public:
  // Adds a record; `name` lacks the root folder. The records that torch adds to every archive get this format's
  // content, not the given one. DuplicateRecordError: the name is the manifest's.
  void add(const std::string& name, Content content) {
    if (name == kManifestName) {
      throw Error(errors::kDuplicateRecord, name + " is the manifest's name; a record cannot have it");
    }
    if (name != kDropped) sources_.insert_or_assign(name, Source{std::move(content), {name, 0, {}}});
  }

  // Reads every content once and returns the manifest's `records`, including the records that torch looks for.
  // UnsafeRecordNameError, DuplicateRecordError.
  std::vector<Record> records() {
    measure();
    std::vector<Record> records;
    for (const auto& [name, source] : sources_) records.push_back(source.record);
    return records;
  }

  // Writes the package: the same bytes for the same manifest and contents. Throws the error of a rule that the package
  // would break; ExportkitError if a content changed since `records()` read it; FileError.
  void finish(const std::filesystem::path& path, const std::string& text) {
    measure();
    check_manifest_size(text.size());
    const Manifest manifest = decode_manifest(text);
    check_consistency(manifest);
    // The manifest comes first, so that it can be read from the first few kilobytes.
    std::vector<Entry> entries{
        laid_out(concat(kRoot, kManifestName), text.size(), crc32(0, text.data(), text.size()), 0)};
    for (const auto& [name, source] : sources_) {
      const auto size = static_cast<uint64_t>(source.record.size);
      entries.push_back(laid_out(std::string(kRoot) + name, size, source.crc32, entries.back().end()));
    }
    std::vector<Entry> listed(entries.begin() + 1, entries.end());
    for (Entry& entry : listed) entry.name.erase(0, kRoot.size());
    check_listed(manifest.records, listed);
    const std::string directory = central_directory(entries);
    WrittenWhole file(path, 0666);
    file.reserve(entries.back().end() + directory.size());
    auto entry = entries.begin();
    file.write(local_header(*entry));
    file.write(text);
    for (const auto& [name, source] : sources_) {
      file.write(local_header(*++entry));
      copy(source.content, *entry, file);
    }
    file.write(directory);
    file.finish(/*durable=*/true);
  }

 private:
  struct Source {
    Content content;
    Record record;
    uint32_t crc32 = 0;
  };

  void measure() {
    if (measured_) return;
    for (const StockRecord& stock : kStockRecords) {
      add(std::string(stock.name), [&stock](const Sink& sink) { sink(stock.content); });
    }
    std::vector<std::string> names;
    std::vector<Source*> sources;
    for (auto& [name, source] : sources_) {
      names.push_back(std::string(kRoot) + name);
      sources.push_back(&source);
    }
    check_record_names({names.begin(), names.end()});
    // How much there is to read is not known yet.
    in_threads(sources.size(), kWorthThreads, [&](size_t i) {
      Source& source = *sources[i];
      source.record.size = source.crc32 = 0;
      Sha256 digest;
      source.content([&](std::string_view block) {
        source.record.size += static_cast<int64_t>(block.size());
        source.crc32 = crc32(source.crc32, block.data(), block.size());
        digest.update(block.data(), block.size());
      });
      source.record.sha256 = digest.hex();
    });
    measured_ = true;
  }

  std::map<std::string, Source> sources_;  // by name
  bool measured_ = false;
};

}  // namespace
}  // namespace exportkit

using namespace exportkit;
using namespace exportkit::c_api;

struct ek_writer {
  PackageWriter writer;
};

extern "C" {

ek_writer* ek_writer_new(void) { return new (std::nothrow) ek_writer; }

int ek_writer_add_bytes(ek_writer* writer, const char* name, const void* data, size_t size) {
  return guarded([&] {
    const std::string_view content(static_cast<const char*>(data), size);
    writer->writer.add(name, [content](const Sink& sink) { sink(content); });
  });
}

int ek_writer_add_file(ek_writer* writer, const char* name, const char* path) {
  return guarded([&] {
    writer->writer.add(name, [path = std::filesystem::path(path)](const Sink& sink) {
      const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
      if (!file) throw FileError(path);
      read_blocks(file.get(), 0, std::numeric_limits<int64_t>::max(), sink);
    });
  });
}

int ek_writer_add_record(ek_writer* writer, const char* name, const ek_package* package, const char* record) {
  return guarded([&] {
    const PackageReader& reader = package->reader;
    reader.record(record);
    writer->writer.add(name,
                       [&reader, record = std::string(record)](const Sink& sink) { reader.blocks(record, sink); });
  });
}

int ek_writer_records(ek_writer* writer, ek_text* records) {
  return guarded([&] {
    answer(records, json_list(writer->writer.records(), [](const Record& record) {
             return json_object({{"name", json_text(record.name)},
                                 {"size", std::to_string(record.size)},
                                 {"sha256", json_text(record.sha256)}});
           }));
  });
}

int ek_writer_finish(ek_writer* writer, const char* path, const char* manifest, size_t size) {
  return guarded([&] { writer->writer.finish(path, std::string(manifest, size)); });
}

void ek_writer_close(ek_writer* writer) { delete writer; }
}
