// Calls the CUDA driver, which is loaded on first use: one build of this library works with and without CUDA.
#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <utility>

namespace exportkit {

// Returns the address of one of the driver's functions, or null if the driver lacks it. Throws c10::Error if there is
// no driver.
void* driver_function(const char* name);
template <class Function>
void find_if_in_driver(const char* name, Function& function) {
  function = reinterpret_cast<Function>(driver_function(name));
}
// The same, but throws c10::Error if the driver lacks the function.
template <class Function>
void find_in_driver(const char* name, Function& function) {
  find_if_in_driver(name, function);
  TORCH_CHECK(function != nullptr, "the CUDA driver has no ", name);
}

// The newest CUDA that the driver supports, such as "13.0"; nothing without a driver.
std::optional<std::string> driver_cuda();

// (major, minor) of a device's compute capability. c10::Error if the driver does not report it.
std::pair<int, int> cuda_capability(int device);

// Makes a device's context current in this thread if none is. Compiled code launches kernels through the driver, which
// needs a current context. torch sets one with a thread's first call of CUDA's runtime, which a new thread has not
// made.
void ensure_cuda_context(int device);

}  // namespace exportkit
