// Recorded cases.
#pragma once

#include "exportkit/runtime.h"
#include "package/reader.h"

namespace exportkit {

// Reads a case and moves it to a device: CaseError, DigestMismatchError.
RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device);

}  // namespace exportkit
