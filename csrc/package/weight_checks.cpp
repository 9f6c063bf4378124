#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "package/consistency.h"
#include "package/manifest_checks.h"
#include "package/safetensors.h"

namespace exportkit {

namespace {

constexpr std::string_view kWeightsDir = "data/weights/";

// Checks that the strides address every element of the record once, so that nothing outside it is read.
void check_strides(const Weight& weight) {
  const std::string what = "weight " + shown(weight.name);
  require(item_bytes(weight.dtype) > 0, [&] { return what + " has the unknown dtype " + shown(weight.dtype); });
  require(weight.strides.size() == weight.shape.size(), [&] {
    return what + " has " + std::to_string(weight.strides.size()) + " strides for " +
           std::to_string(weight.shape.size()) + " dimensions";
  });
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (size_t i = 0; i < weight.shape.size(); ++i) {
    if (weight.shape[i] == 0) return;
    if (weight.shape[i] > 1) steps.emplace_back(weight.strides[i], weight.shape[i]);
  }
  std::sort(steps.begin(), steps.end());
  unsigned __int128 step = 1;
  for (const auto& [stride, size] : steps) {
    require(static_cast<uint64_t>(stride) == step, [&] { return what + " has strides that leave gaps or overlap"; });
    step *= static_cast<uint64_t>(size);  // cannot overflow: `step` equals a stride, which is at most 2^62
  }
}

void check_weight_record(const Weight& weight, const Manifest& manifest) {
  const std::string what = "weight " + shown(weight.name);
  const Record* found = record_of(manifest, *weight.record);
  require(found, [&] { return what + ": there is no record " + shown(*weight.record); });
  require(found->name.starts_with(kWeightsDir),
          [&] { return what + ": " + shown(found->name) + " is not under " + std::string(kWeightsDir); });
  require(static_cast<uint64_t>(found->size) == weight_bytes(weight), [&] {
    return what + " does not have the size of its record " + shown(found->name) + ", which has " +
           std::to_string(found->size);
  });
}

}  // namespace

uint64_t item_bytes(std::string_view dtype) {
  if (dtype == "complex32") return 4;  // these two, safetensors does not have
  return dtype == "complex128" ? 16 : safetensors::item_size(dtype);
}

void check_weights(const Manifest& manifest) {
  std::unordered_map<std::string_view, const Weight*> weights;
  Names seen;
  for (const Weight& weight : manifest.weights) {
    weights.emplace(weight.name, &weight);
    const auto check_name = [&](std::string_view name) {
      require(seen.insert(name).second, [&] { return "weight " + shown(name) + " appears twice"; });
    };
    check_name(weight.name);
    for (const std::string& alias : weight.aliases) check_name(alias);
    check_strides(weight);
    if (weight.record) check_weight_record(weight, manifest);
  }
  for (const Target& target : manifest.targets) {
    for (const auto& constants : target.constants) {
      for (const auto& constant : constants.second) {
        const std::string& name = constant.second;
        const auto found = weights.find(name);
        require(found != weights.end() && found->second->record, [&] {
          return "target " + target.name + " takes " + shown(constant.first) + " from " + shown(name) +
                 ", which is not a weight with a record";
        });
      }
    }
  }
}

uint64_t weight_bytes(const Weight& weight) {
  if (std::find(weight.shape.begin(), weight.shape.end(), 0) != weight.shape.end()) return 0;
  // Capped above the size of any record, so that nothing overflows.
  constexpr unsigned __int128 kMost = std::numeric_limits<uint64_t>::max();
  unsigned __int128 bytes = item_bytes(weight.dtype);
  for (const int64_t size : weight.shape) bytes = std::min(bytes * static_cast<uint64_t>(size), kMost);
  return static_cast<uint64_t>(bytes);
}

}  // namespace exportkit
