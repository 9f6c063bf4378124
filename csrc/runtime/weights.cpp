#include "runtime/weights.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "runtime/inputs.h"

namespace exportkit {
namespace {

// The manifest was checked: there is such a weight, with a record of as many bytes.
const Weight& weight_of(const Manifest& manifest, const std::string& name) {
  return *std::find_if(manifest.weights.begin(), manifest.weights.end(),
                       [&](const Weight& weight) { return weight.name == name; });
}

}  // namespace

MappedWeights::MappedWeights(const PackageReader& reader, const Target& target) {
  if (target.constants.empty()) return;
  size_ = reader.size();
  // Read-only: code that should write to a weight gets a fault, and nobody another weight.
  file_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED, reader.fd(), 0);
  if (file_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), reader.path().string());
  for (const auto& [constant, name] : target.constants) {
    const Weight& weight = weight_of(reader.manifest(), name);
    char* data = static_cast<char*>(file_) + reader.data_offset(*weight.record);
    constants_.emplace(constant, at::from_blob(data, weight.shape, weight.strides, dtype_of(weight.dtype)));
  }
}

MappedWeights::~MappedWeights() {
  if (size_ > 0) munmap(file_, size_);
}

}  // namespace exportkit
