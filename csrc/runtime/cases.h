// Recorded calls, and their comparison with new outputs by the rules of exportkit/verify/compare.py.
#pragma once

#include "exportkit/runtime.h"
#include "package/reader.h"

namespace exportkit {

// Reads a case and moves it to a device: CaseError, DigestMismatchError.
RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device);

// Compares the outputs of a call with those of a recorded one, by the rule of FORMAT.md ("Verdicts").
CaseReport compare(const Manifest& manifest, const RecordedCase& recorded, const std::vector<at::Tensor>& actual);

}  // namespace exportkit
