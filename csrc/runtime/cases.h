// Recorded calls, and how what comes out now compares, by the rules of exportkit/verify/compare.py.
#pragma once

#include "exportkit/runtime.h"
#include "package/reader.h"

namespace exportkit {

// Reads a case onto a device: CaseError, DigestMismatchError.
RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device);

// What a call returned, against what it should have, each output within its recorded tolerance. NaN equals NaN, an
// infinity equals itself.
CaseReport compare(const std::vector<TensorOutput>& outputs, const std::vector<at::Tensor>& expected,
                   const std::vector<at::Tensor>& actual);

}  // namespace exportkit
