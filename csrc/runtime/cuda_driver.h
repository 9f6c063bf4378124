// What is asked of CUDA's driver itself, found when it is needed: one build of this library serves torch with and
// without CUDA.
#pragma once

#include <utility>

namespace exportkit {

// (major, minor) of a device's compute capability. c10::Error where the driver does not say.
std::pair<int, int> cuda_capability(int device);

// Makes a device's context current in this thread, where none is. Compiled code launches its kernels through the
// driver, which needs one; torch makes it current with the first call of CUDA's runtime, which a new thread has not
// made.
void ensure_cuda_context(int device);

}  // namespace exportkit
