// Checks the tensors of recorded cases (rule 14).
#pragma once

#include <string_view>
#include <vector>

#include "package/manifest.h"
#include "package/safetensors.h"

namespace exportkit {

// Checks that a file has exactly the tensors of a case's calls, with the dtypes and shapes that the manifest gives them
// at the case's sizes: CaseError. The manifest must have been checked.
void check_case(const Manifest& manifest, const Case& recorded, const std::vector<safetensors::Place>& places);

// The same of a whole file's content: CaseError, also if it is not a safetensors file.
void check_case(const Manifest& manifest, const Case& recorded, std::string_view content);

}  // namespace exportkit
