// Private helpers of the manifest's checks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "package/errors.h"
#include "package/manifest.h"
#include "package/text.h"

namespace exportkit {

using Names = std::unordered_set<std::string_view>;

// Throws ManifestConsistencyError, with the parts as its message.
template <class... Parts>
[[noreturn]] void inconsistent(const Parts&... parts) {
  throw Error(errors::kManifestConsistency, concat(parts...));
}

// The same unless `holds`.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) inconsistent(parts...);
}

// The names of a list's items, which are `what`; refuses a name that appears twice.
template <class List, class NameOf, class... Parts>
Names distinct(const List& list, NameOf name_of, const Parts&... what) {
  Names seen;
  for (const auto& item : list) {
    const std::string_view name = name_of(item);
    require(seen.insert(name).second, what..., " ", Quoted{name}, " appears twice");
  }
  return seen;
}

inline constexpr auto kItself = [](const auto& item) -> std::string_view { return item; };
inline constexpr auto kName = [](const auto& item) -> std::string_view { return item.name; };
inline constexpr auto kRecord = [](const auto& item) -> std::string_view { return item.record; };

using Dimensions = std::unordered_map<std::string_view, const Dimension*>;

inline Dimensions dimensions_of(const Call& call) {
  Dimensions found;
  for (const Dimension& dimension : call.dimensions) found.emplace(dimension.name, &dimension);
  return found;
}

inline constexpr size_t kMaxRank = 64;  // sizes of a tensor

// The size of one element in bytes; 0 for a dtype that a package cannot hold.
uint64_t item_bytes(std::string_view dtype);

// `each` times the sizes, which are not negative; the greatest number if that does not fit.
uint64_t capped_product(uint64_t each, const std::vector<int64_t>& sizes);

// The record of this name, or null. The records must be sorted.
const Record* record_of(const Manifest& manifest, std::string_view name);

// Checks the tolerance of what is no output: it is finite and refers to nothing.
void check_own_tolerance(const OutputTolerance& tolerance, const std::string& what);

// The parts of check_consistency.
void check_call(const Call& call);
void check_methods(const Manifest& manifest);
Names check_weights(const Manifest& manifest);  // which returns the names of all weights
void check_state(const Manifest& manifest, const Names& weights);
void check_cases(const Manifest& manifest);

}  // namespace exportkit
