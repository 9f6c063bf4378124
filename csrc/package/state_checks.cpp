// The rules of weights, of methods and of the state that these share.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "package/consistency.h"
#include "package/manifest_checks.h"
#include "package/safetensors.h"

namespace exportkit {
namespace {

constexpr std::string_view kStateDir = "exportkit/state/";
constexpr size_t kMaxMethodName = 64;  // characters: folders are named after it
constexpr uint64_t kMaxBytes = uint64_t{1} << 62;

std::string named(const StateTensor& state) { return "state " + shown(state.name); }

// The bytes of a state of this many rows, or of its own number of them.
uint64_t bytes_with(const StateTensor& state, int64_t rows) {
  std::vector<int64_t> sizes;
  for (const Extent& extent : state.shape) sizes.push_back(size_of(extent) ? rows : std::get<int64_t>(extent));
  return capped_product(item_bytes(state.dtype), sizes);
}

// --- one tensor ----------------------------------------------------------------------------------------------------

void check_names(const Manifest& manifest, const Names& weights) {
  Names seen;
  const auto check = [&](const std::string& name) {
    require(!weights.contains(name), "state ", Quoted{name}, " has the name of a weight");
    require(seen.insert(name).second, "state ", Quoted{name}, " appears twice");
  };
  for (const StateTensor& state : manifest.state) {
    check(state.name);
    for (const std::string& alias : state.aliases) check(alias);
  }
}

void check_shape(const StateTensor& state) {
  require(item_bytes(state.dtype) > 0, named(state), " has the unknown dtype ", Quoted{state.dtype});
  require(state.shape.size() <= kMaxRank, named(state), " has ", state.shape.size(), " sizes; at most ", kMaxRank,
          " are allowed");
  for (size_t axis = 0; axis < state.shape.size(); ++axis) {
    const Size* size = size_of(state.shape[axis]);
    if (!size) continue;
    require(axis == 0 && size->scale == 1 && size->offset == 0, named(state),
            " has a size that varies other than a dimension itself as the first size: ", size->scale, "*",
            size->dimension, " and ", size->offset, " as size ", axis);
  }
}

void check_initial(const StateTensor& state, const Manifest& manifest) {
  const Record* record = record_of(manifest, *state.initial);
  const std::string what = named(state) + ": its initial value " + shown(*state.initial);
  require(record, what, " is not a record");
  require(record->name == std::string(kStateDir) + record->sha256, what, " is not ", kStateDir,
          " and the sha256 of its content");
  require(static_cast<uint64_t>(record->size) == initial_bytes(state), what, " has ", record->size,
          " bytes; dtype and shape take ", initial_bytes(state),
          (rows_of(state) ? ", with one row of what varies" : ""));
}

// --- all of it -----------------------------------------------------------------------------------------------------

// Checks which state the methods use; returns the dimensions of state, each as the first method has it.
Dimensions check_uses(const Manifest& manifest) {
  std::vector<bool> used(manifest.state.size());
  Dimensions found;
  for (const Method& method : manifest.methods) {
    const std::string what = "method " + method.name;
    const Dimensions dimensions = method.state.empty() ? Dimensions{} : dimensions_of(method.call);
    std::unordered_set<int64_t> taken;
    for (const StateUse& use : method.state) {
      require(static_cast<size_t>(use.index) < manifest.state.size(), what, " uses state ", use.index, "; there are ",
              manifest.state.size(), " state tensors, counted from 0");
      require(taken.insert(use.index).second, what, " uses state ", use.index, " twice");
      const auto index = static_cast<size_t>(use.index);
      used[index] = true;
      const StateTensor& state = manifest.state[index];
      const Size* rows = rows_of(state);
      if (!rows) continue;
      const auto its = dimensions.find(rows->dimension);
      require(its != dimensions.end(), what, " uses ", named(state), " but has no dimension ", rows->dimension,
              ", which varies in it");
      const Dimension& first = *found.emplace(rows->dimension, its->second).first->second;
      require(first.min == its->second->min && first.max == its->second->max, what, " has ", its->second->min, " to ",
              its->second->max, " for dimension ", rows->dimension, " of ", named(state), "; another method has ",
              first.min, " to ", first.max);
    }
  }
  for (size_t i = 0; i < used.size(); ++i) require(used[i], named(manifest.state[i]), " is used by no method");
  return found;
}

void check_bytes(const Manifest& manifest, const Dimensions& dimensions) {
  uint64_t all = 0;
  for (const StateTensor& state : manifest.state) {
    const Size* rows = rows_of(state);
    // One row at least, so that the record of the initial value has a size, too.
    const uint64_t bytes = bytes_with(state, rows ? std::max<int64_t>(dimensions.at(rows->dimension)->min, 1) : 0);
    require(bytes <= kMaxBytes - all, "the state up to ", Quoted{state.name},
            " has more than 2^62 bytes even at its smallest, which no memory holds");
    all += bytes;
  }
}

constexpr std::string_view kWeightsDir = "data/weights/";

// Checks that the strides address every element of the record once, so that nothing outside it is read.
void check_strides(const Weight& weight) {
  const std::string what = "weight " + shown(weight.name);
  require(item_bytes(weight.dtype) > 0, what, " has the unknown dtype ", Quoted{weight.dtype});
  require(weight.strides.size() == weight.shape.size(), what, " has ", weight.strides.size(), " strides for ",
          weight.shape.size(), " dimensions");
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (size_t i = 0; i < weight.shape.size(); ++i) {
    if (weight.shape[i] == 0) return;
    if (weight.shape[i] > 1) steps.emplace_back(weight.strides[i], weight.shape[i]);
  }
  std::ranges::sort(steps);
  unsigned __int128 step = 1;
  for (const auto& [stride, size] : steps) {
    require(static_cast<uint64_t>(stride) == step, what, " has strides that leave gaps or overlap");
    step *= static_cast<uint64_t>(size);  // cannot overflow: `step` equals a stride, which is at most 2^62
  }
}

void check_weight_record(const Weight& weight, const Manifest& manifest) {
  const std::string what = "weight " + shown(weight.name);
  const Record* found = record_of(manifest, *weight.record);
  require(found, what, ": there is no record ", Quoted{*weight.record});
  require(found->name.starts_with(kWeightsDir), what, ": ", Quoted{found->name}, " is not under ", kWeightsDir);
  require(static_cast<uint64_t>(found->size) == weight_bytes(weight), what, " does not have the size of its record ",
          Quoted{found->name}, ", which has ", found->size);
}

}  // namespace

void check_methods(const Manifest& manifest) {
  require(!manifest.methods.empty(), "the package has no method, so there is nothing to call");
  distinct(manifest.methods, kName, "method");
  for (const Method& method : manifest.methods) {
    require(is_name(method.name) && method.name.size() <= kMaxMethodName, "method ", Quoted{method.name},
            " has a name that is not allowed");
    try {
      check_call(method.call);
    } catch (const Error& error) {
      throw Error(errors::kManifestConsistency, "method " + method.name + ": " + error.message(), error.hint());
    }
  }
}

void check_state(const Manifest& manifest, const Names& weights) {
  check_names(manifest, weights);
  for (const StateTensor& state : manifest.state) {
    check_shape(state);
    check_own_tolerance(state.tolerance, named(state));
  }
  check_bytes(manifest, check_uses(manifest));
  for (const StateTensor& state : manifest.state) {
    if (state.initial) check_initial(state, manifest);
  }
}

uint64_t initial_bytes(const StateTensor& state) { return bytes_with(state, 1); }

uint64_t item_bytes(std::string_view dtype) {
  if (dtype == "complex32") return 4;  // these two, safetensors does not have
  return dtype == "complex128" ? 16 : safetensors::item_size(dtype);
}

Names check_weights(const Manifest& manifest) {
  std::unordered_map<std::string_view, const Weight*> weights;
  Names seen;
  for (const Weight& weight : manifest.weights) {
    weights.emplace(weight.name, &weight);
    const auto check_name = [&](std::string_view name) {
      require(seen.insert(name).second, "weight ", Quoted{name}, " appears twice");
    };
    check_name(weight.name);
    for (const std::string& alias : weight.aliases) check_name(alias);
    check_strides(weight);
    if (weight.record) check_weight_record(weight, manifest);
  }
  for (const Target& target : manifest.targets) {
    for (const auto& [method, constants] : target.constants) {
      for (const auto& [constant, name] : constants) {
        const auto found = weights.find(name);
        require(found != weights.end() && found->second->record, "target ", target.name, " takes ", Quoted{constant},
                " from ", Quoted{name}, ", which is not a weight with a record");
      }
    }
  }
  return seen;
}

uint64_t capped_product(uint64_t each, const std::vector<int64_t>& sizes) {
  if (std::ranges::count(sizes, 0) > 0) return 0;
  unsigned __int128 product = each;
  for (const int64_t size : sizes)
    product = std::min<unsigned __int128>(product * static_cast<uint64_t>(size), UINT64_MAX);
  return static_cast<uint64_t>(product);
}

uint64_t weight_bytes(const Weight& weight) { return capped_product(item_bytes(weight.dtype), weight.shape); }

}  // namespace exportkit
