// Recorded cases.
#pragma once

#include "exportkit/runtime.h"
#include "package/reader.h"
#include "runtime/methods.h"

namespace exportkit {

// Reads a case and moves it to a device: CaseError, DigestMismatchError.
RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device);

// The sizes of a session in which a recorded case can run.
Sizes session_sizes(const Model& model, const RecordedCase& recorded);

}  // namespace exportkit
