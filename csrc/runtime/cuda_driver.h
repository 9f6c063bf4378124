// Calls the CUDA driver, which is loaded on first use: one build of this library works with and without CUDA.
#pragma once

#include <utility>

namespace exportkit {

// The address of a function of the driver. c10::Error if there is no driver, or it has no such function.
void* find_in_driver(const char* name);
template <class Function>
void find_in_driver(const char* name, Function& function) {
  function = reinterpret_cast<Function>(find_in_driver(name));
}

// (major, minor) of a device's compute capability. c10::Error if the driver does not report it.
std::pair<int, int> cuda_capability(int device);

// Makes a device's context current in this thread if none is. Compiled code launches kernels through the driver, which
// needs a current context. torch sets one with a thread's first call of CUDA's runtime, which a new thread has not
// made.
void ensure_cuda_context(int device);

}  // namespace exportkit
