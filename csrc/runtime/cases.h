// Recorded calls, and their comparison with new outputs by the rules of exportkit/verify/compare.py.
#pragma once

#include "exportkit/runtime.h"
#include "package/reader.h"

namespace exportkit {

// Reads a case and moves it to a device: CaseError, DigestMismatchError.
RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device);

// Compares the outputs of a call with the expected ones, each within its recorded tolerance. NaN equals NaN, and an
// infinity equals itself.
CaseReport compare(const std::vector<TensorOutput>& outputs, const std::vector<at::Tensor>& expected,
                   const std::vector<at::Tensor>& actual);

}  // namespace exportkit
