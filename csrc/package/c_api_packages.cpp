// The functions of package.h that open, unpack and map packages.
#include <memory>
#include <optional>

#include "package/c_api.h"
#include "package/cache.h"
#include "package/consistency.h"
#include "package/json_fields.h"
#include "package/mapping.h"
#include "package/opened_file.h"
#include "package/state_files.h"
#include "package/text.h"
#include "package/trust.h"
#include "package/trust_records.h"

using namespace exportkit;
using namespace exportkit::c_api;

struct ek_arriving {
  ArrivingPackage package;
};

struct ek_mapping {
  WeightMapping weights;
};

struct ek_entry {
  CacheEntry entry;
};

namespace {

ek_package* opened(OpenedFile file, const ek_demand* demand) {
  std::optional<SignatureRequest> request;
  if (demand != nullptr) request = request_of(*demand);
  auto made =
      std::unique_ptr<ek_package>(new ek_package{PackageReader(std::move(file), request ? &*request : nullptr), {}});
  made->signers = json_list(made->reader.signers(), key_json);
  return made.release();
}

Unpacking unpacking(int always) { return {always != 0, warn}; }

const Library& library_of(const ek_package* package, const char* record) {
  for (const Library& library : package->reader.manifest().libraries) {
    if (library.record == record) return library;
  }
  throw Error(errors::kUsage, "the package has no library " + shown(record));
}

}  // namespace

extern "C" {

// --- packages --------------------------------------------------------------------------------------------------------

int ek_arriving_new(const char* name, uint64_t limit, ek_arriving** arriving) {
  return guarded([&] { *arriving = new ek_arriving{ArrivingPackage(name, limit)}; });
}

int ek_arriving_write(ek_arriving* arriving, const void* piece, size_t size) {
  return guarded([&] { arriving->package.write({static_cast<const char*>(piece), size}); });
}

void ek_arriving_close(ek_arriving* arriving) { delete arriving; }

int ek_package_open(const char* path, const ek_demand* demand, ek_package** package) {
  return guarded([&] { *package = opened(OpenedFile::by_path(path), demand); });
}

int ek_package_open_descriptor(int descriptor, const ek_demand* demand, ek_package** package) {
  return guarded([&] { *package = opened(OpenedFile::of_file(descriptor), demand); });
}

int ek_package_open_arrived(ek_arriving* arriving, const ek_demand* demand, ek_package** package) {
  return guarded([&] { *package = opened(std::move(arriving->package).seal(), demand); });
}

void ek_package_close(ek_package* package) { delete package; }

const char* ek_package_name(const ek_package* package) { return package->reader.name().c_str(); }

ek_text ek_package_manifest(const ek_package* package) { return view(package->reader.manifest_text()); }

const char* ek_package_manifest_sha256(const ek_package* package) { return package->reader.manifest_sha256().c_str(); }

uint64_t ek_package_size(const ek_package* package) { return package->reader.size(); }

int ek_package_fd(const ek_package* package) { return package->reader.fd(); }

int ek_package_sha256(ek_package* package, const char** hex) {
  return guarded([&] { *hex = package->reader.sha256().c_str(); });
}

int ek_package_data_offset(const ek_package* package, const char* name, uint64_t* offset) {
  return guarded([&] { *offset = package->reader.data_offset(name); });
}

int ek_package_read(const ek_package* package, const char* name, void* buffer, size_t size) {
  return guarded([&] {
    if (static_cast<uint64_t>(package->reader.record(name).size) != size) {
      throw Error(errors::kUsage, std::string("record ") + name + " and its buffer differ in size");
    }
    package->reader.read(name, static_cast<char*>(buffer));
  });
}

int ek_package_extract(const ek_package* package, const char* name, const char* destination, unsigned mode) {
  return guarded([&] { package->reader.extract(name, destination, mode); });
}

int ek_package_state_digest(const ek_package* package, ek_text* digest) {
  return guarded([&] { answer(digest, state_digest(package->reader.manifest())); });
}

int ek_package_match_state_file(const ek_package* package, const char* given, const char* sizes, int part,
                                ek_text* values) {
  return guarded([&] {
    JsonReader json(given, 8), numbers(sizes, 8);
    const StateFile file = object(FIELD(StateFile, path, text), FIELD(StateFile, metadata, map_of(text)),
                                  field("tensors", &StateFile::places, read_places))(json);
    const auto rows = map_of(integer)(numbers);
    const Manifest& manifest = package->reader.manifest();
    const auto found = part == EK_WHOLE_STATE ? match_whole_state(manifest, rows, file)
                                              : match_part_of_state(manifest, rows, file, part == EK_PART_OF_A_ROW);
    answer(values, json_list(found, [](const StateValue& value) {
             const auto number = [](int64_t size) { return std::to_string(size); };
             return json_object({{"index", std::to_string(value.index)},
                                 {"tensor", value.from ? json_text(value.from->name) : "null"},
                                 {"scale", json_number(value.scale)},
                                 {"shape", json_list(value.shape, number)}});
           }));
  });
}

int ek_package_verify(const ek_package* package) {
  return guarded([&] { package->reader.verify(); });
}

int ek_package_verify_once(ek_package* package, int always, int* read) {
  return guarded([&] { *read = verify_once(package->reader, always != 0) ? 1 : 0; });
}

int ek_package_check_case(const ek_package* package, size_t index, const void* content, size_t size) {
  return guarded([&] {
    const Manifest& manifest = package->reader.manifest();
    if (index >= manifest.cases.size()) throw Error(errors::kUsage, "the package has no case " + std::to_string(index));
    check_case(manifest, manifest.cases[index], {static_cast<const char*>(content), size});
  });
}

int ek_package_check_unchanged(const ek_package* package) {
  return guarded([&] { package->reader.check_unchanged(); });
}

ek_text ek_package_signers(const ek_package* package) { return view(package->signers); }

int ek_package_signature_files(const ek_package* package, ek_text* files) {
  return guarded([&] {
    answer(files, json_list(signature_files(package->reader), [](const SignatureFile& file) {
             return json_object({{"path", json_text(file.path.string())},
                                 {"key_ids", json_list(file.key_ids, json_text)},
                                 {"problem", file.problem.empty() ? "null" : json_text(file.problem)}});
           }));
  });
}

int ek_package_map(ek_package* package, ek_mapping** mapping) {
  return guarded([&] { *mapping = new ek_mapping{WeightMapping(package->reader)}; });
}

const void* ek_mapping_data(const ek_mapping* mapping, const char* record) { return mapping->weights.data(record); }

void ek_mapping_close(ek_mapping* mapping) { delete mapping; }

// --- the cache -------------------------------------------------------------------------------------------------------

int ek_package_unpack_library(const ek_package* package, const char* record, int always, ek_entry** entry) {
  return guarded(
      [&] { *entry = new ek_entry{unpack(package->reader, library_of(package, record), unpacking(always))}; });
}

int ek_package_unpack_target(const ek_package* package, const char* folder, int always, ek_entry** entry) {
  return guarded([&] { *entry = new ek_entry{unpack_code(package->reader, folder, unpacking(always))}; });
}

int ek_compiled_entry(const char* digest, ek_entry** entry) {
  return guarded([&] { *entry = new ek_entry{compiled_entry(digest)}; });
}

const char* ek_entry_folder(const ek_entry* entry) { return entry->entry.folder.c_str(); }

const char* ek_entry_library(const ek_entry* entry) { return entry->entry.library.c_str(); }

void ek_entry_close(ek_entry* entry) { delete entry; }
}
