// Checks that the parts of a manifest agree: every reference has a target, and names are unique.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "package/manifest.h"

namespace exportkit {

// Checks a manifest without reading any record. ManifestConsistencyError names the faulty part.
void check_consistency(const Manifest& manifest);

// Checks that the content of a file is a safetensors file with exactly the tensors of a case's calls, with the dtypes
// and shapes that the manifest gives them at the case's sizes (rule 14): CaseError. The manifest must have been
// checked.
void check_case(const Manifest& manifest, const Case& recorded, std::string_view content);

// The libraries a target needs, in loading order. CPU libraries come first, because they define the operators.
std::vector<const Library*> libraries_for(const std::vector<Library>& libraries, const Target& target);

// The name that what a call writes into an input has among its results.
std::string written_name(const TensorInput& input);

// The size of a weight's record in bytes.
uint64_t weight_bytes(const Weight& weight);

// The size of the record of a state's initial value in bytes, whether it has one or not.
uint64_t initial_bytes(const StateTensor& state);

}  // namespace exportkit
