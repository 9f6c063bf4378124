// What a manifest must satisfy beyond its shape: everything it refers to is there, and nothing is said twice.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "package/manifest.h"

namespace exportkit {

inline constexpr int kMaxStructureDepth = 32;  // of containers within containers

// Checks a manifest against itself; no record is looked at. ManifestConsistencyError names the part.
void check_consistency(const Manifest& manifest);

// The libraries a target needs, in the order to load them: those for the CPU, which define operators, first.
std::vector<const Library*> libraries_for(const Manifest& manifest, const Target& target);

// How many bytes a weight's record has.
uint64_t weight_bytes(const Weight& weight);

}  // namespace exportkit
