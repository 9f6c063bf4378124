// The rules of methods and of the state that they share.
#include <algorithm>
#include <string>
#include <vector>

#include "package/consistency.h"
#include "package/manifest_checks.h"

namespace exportkit {

namespace {

constexpr std::string_view kStateDir = "exportkit/state/";
constexpr size_t kMaxRank = 64;
constexpr size_t kMaxMethodName = 64;  // characters: folders are named after it
constexpr uint64_t kMaxBytes = uint64_t{1} << 62;

std::string named(const StateTensor& state) { return "state " + shown(state.name); }

const Size* rows_of(const StateTensor& state) {
  return state.shape.empty() ? nullptr : std::get_if<Size>(state.shape.data());
}

// The bytes of a state of this many rows, or of its own number of them. Capped above kMaxBytes, so that nothing
// overflows.
uint64_t bytes_with(const StateTensor& state, uint64_t rows) {
  std::vector<uint64_t> sizes;
  for (const Extent& extent : state.shape) {
    const auto* fixed = std::get_if<int64_t>(&extent);
    sizes.push_back(fixed ? static_cast<uint64_t>(*fixed) : rows);
  }
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  unsigned __int128 bytes = item_bytes(state.dtype);
  for (const uint64_t size : sizes) bytes = std::min<unsigned __int128>(bytes * size, kMaxBytes + 1);
  return static_cast<uint64_t>(bytes);
}

// --- one tensor ----------------------------------------------------------------------------------------------------

void check_names(const Manifest& manifest) {
  Names weights, seen;
  for (const Weight& weight : manifest.weights) {
    weights.insert(weight.name);
    weights.insert(weight.aliases.begin(), weight.aliases.end());
  }
  const auto check = [&](const std::string& name) {
    require(!weights.contains(name), [&] { return "state " + shown(name) + " has the name of a weight"; });
    require(seen.insert(name).second, [&] { return "state " + shown(name) + " appears twice"; });
  };
  for (const StateTensor& state : manifest.state) {
    check(state.name);
    for (const std::string& alias : state.aliases) check(alias);
  }
}

void check_shape(const StateTensor& state) {
  require(item_bytes(state.dtype) > 0, [&] { return named(state) + " has the unknown dtype " + shown(state.dtype); });
  require(state.shape.size() <= kMaxRank, [&] {
    return named(state) + " has " + std::to_string(state.shape.size()) + " sizes; at most " + std::to_string(kMaxRank) +
           " are allowed";
  });
  for (size_t axis = 0; axis < state.shape.size(); ++axis) {
    const auto* size = std::get_if<Size>(&state.shape[axis]);
    require(!size || (axis == 0 && size->scale == 1 && size->offset == 0), [&] {
      return named(state) +
             " has a size that varies other than a dimension itself as the first size: " + std::to_string(size->scale) +
             "*" + size->dimension + " and " + std::to_string(size->offset) + " as size " + std::to_string(axis);
    });
  }
}

void check_initial(const StateTensor& state, const Manifest& manifest) {
  const Record* record = record_of(manifest, *state.initial);
  const auto what = [&] { return named(state) + ": its initial value " + shown(*state.initial); };
  require(record, [&] { return what() + " is not a record"; });
  require(record->name == std::string(kStateDir) + record->sha256,
          [&] { return what() + " is not " + std::string(kStateDir) + " and the sha256 of its content"; });
  require(static_cast<uint64_t>(record->size) == initial_bytes(state), [&] {
    return what() + " has " + std::to_string(record->size) + " bytes; dtype and shape take " +
           std::to_string(initial_bytes(state)) + (rows_of(state) ? ", with one row of what varies" : "");
  });
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
      require(static_cast<size_t>(use.index) < manifest.state.size(), [&] {
        return what + " uses state " + std::to_string(use.index) + "; there are " +
               std::to_string(manifest.state.size()) + " state tensors, counted from 0";
      });
      require(taken.insert(use.index).second,
              [&] { return what + " uses state " + std::to_string(use.index) + " twice"; });
      const auto index = static_cast<size_t>(use.index);
      used[index] = true;
      const StateTensor& state = manifest.state[index];
      const Size* rows = rows_of(state);
      if (!rows) continue;
      const auto its = dimensions.find(rows->dimension);
      require(its != dimensions.end(), [&] {
        return what + " uses " + named(state) + " but has no dimension " + rows->dimension + ", which varies in it";
      });
      const Dimension& first = *found.emplace(rows->dimension, its->second).first->second;
      require(first.min == its->second->min && first.max == its->second->max, [&] {
        return what + " has " + std::to_string(its->second->min) + " to " + std::to_string(its->second->max) +
               " for dimension " + rows->dimension + " of " + named(state) + "; another method has " +
               std::to_string(first.min) + " to " + std::to_string(first.max);
      });
    }
  }
  const auto unused = std::find(used.begin(), used.end(), false);
  require(unused == used.end(),
          [&] { return named(manifest.state[static_cast<size_t>(unused - used.begin())]) + " is used by no method"; });
  return found;
}

void check_bytes(const Manifest& manifest, const Dimensions& dimensions) {
  uint64_t all = 0;
  for (const StateTensor& state : manifest.state) {
    const Size* rows = rows_of(state);
    // One row at least, so that the record of the initial value has a size, too.
    const int64_t least = rows ? std::max<int64_t>(dimensions.at(rows->dimension)->min, 1) : 0;
    all = std::min(all + bytes_with(state, static_cast<uint64_t>(least)), kMaxBytes + 1);
    require(all <= kMaxBytes, [&] {
      return "the state up to " + shown(state.name) +
             " has more than 2^62 bytes even at its smallest, which no memory "
             "holds";
    });
  }
}

}  // namespace

void check_methods(const Manifest& manifest) {
  require(!manifest.methods.empty(), [] { return "the package has no method, so there is nothing to call"; });
  distinct(manifest.methods, kName, "method");
  for (const Method& method : manifest.methods) {
    require(is_name(method.name) && method.name.size() <= kMaxMethodName,
            [&] { return "method " + shown(method.name) + " has a name that is not allowed"; });
    try {
      check_call(method.call);
    } catch (const Error& error) {
      throw Error(errors::kManifestConsistency, "method " + method.name + ": " + error.message(), error.hint());
    }
  }
}

void check_state(const Manifest& manifest) {
  check_names(manifest);
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

}  // namespace exportkit
