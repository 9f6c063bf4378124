// libFuzzer: opens a whole file and checks every digest. Most mutations break a header or a digest. The mutator below
// repairs them half of the time, so that the code behind those checks is reached too.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "package/consistency.h"
#include "package/container.h"
#include "package/digests.h"
#include "package/errors.h"
#include "package/reader.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using namespace exportkit;

int memory_file() {
  static const int fd = memfd_create("package", MFD_CLOEXEC);
  return fd;
}

void fill(const uint8_t* data, size_t size) {
  if (ftruncate(memory_file(), 0) != 0 || pwrite(memory_file(), data, size, 0) != static_cast<ssize_t>(size)) abort();
}

void put(std::string& file, size_t at, uint32_t value) {
  for (int i = 0; i < 4; ++i) file[at + static_cast<size_t>(i)] = static_cast<char>(value >> (8 * i) & 0xFF);
}

// Replaces the digests in the manifest by the digests of the records' contents, for records found by name.
void mend_manifest(std::string& file, const Entry& manifest, const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    const std::string name = entry.name.substr(entry.name.find('/') + 1);
    const size_t listed = file.find("\"" + name + "\"", file.find("\"records\"", manifest.data_offset));
    const size_t digest = file.find("\"sha256\":", listed);
    if (listed == std::string::npos || digest == std::string::npos) continue;
    const size_t quote = file.find('"', digest + 9);
    if (quote == std::string::npos || quote + 65 > manifest.end()) continue;
    file.replace(quote + 1, 64, sha256_hex({file.data() + entry.data_offset, entry.size}));
  }
}

// Repairs the manifest's digests, then every CRC-32 in local headers and in the directory.
std::string mended(std::string file) {
  fill(reinterpret_cast<const uint8_t*>(file.data()), file.size());
  std::vector<Entry> entries;
  try {
    entries = check_layout(memory_file(), file.size(), read_directory(memory_file(), file.size()));
  } catch (const Error&) {
    return file;
  }
  if (entries.empty()) return file;
  mend_manifest(file, entries[0], entries);
  size_t central = entries.back().end();
  for (const Entry& entry : entries) {
    const uint32_t crc = crc32(0, file.data() + entry.data_offset, entry.size);
    put(file, entry.offset + 14, crc);
    put(file, central + 16, crc);
    central += 46 + entry.name.size() + 28;
  }
  return file;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  if (seed % 4 == 0 || size < 200) return LLVMFuzzerMutate(data, size, max_size);
  // Changes the content of one record but not its size; otherwise only the layout check would ever run.
  std::string file(reinterpret_cast<char*>(data), size);
  fill(data, size);
  try {
    const std::vector<Entry> entries = check_layout(memory_file(), size, read_directory(memory_file(), size));
    const Entry& entry = entries.at(seed % 3 == 0 ? seed / 16 % entries.size() : 0);
    std::vector<uint8_t> content(data + entry.data_offset, data + entry.end());
    content.resize(content.size() + 64);
    const size_t made = LLVMFuzzerMutate(content.data(), entry.size, content.size());
    content.resize(made);
    content.resize(entry.size, ' ');
    std::memcpy(file.data() + entry.data_offset, content.data(), content.size());
  } catch (const std::exception&) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  file = mended(std::move(file));
  std::memcpy(data, file.data(), file.size());
  return file.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fill(data, size);
  try {
    const PackageReader reader(OpenedFile::of_file(memory_file()));
    reader.verify();
    for (const Record& record : reader.manifest().records) reader.read(record.name);
    for (const Case& recorded : reader.manifest().cases) {
      check_case(reader.manifest(), recorded, reader.read(recorded.record));
    }
  } catch (const Error&) {
  }
  return 0;
}
