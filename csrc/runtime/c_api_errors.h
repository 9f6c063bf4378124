// Turns exceptions into the C interface's errors. No exception passes `attempt`.
#pragma once

#include <string>

#include "exportkit/exportkit.h"
#include "package/errors.h"

namespace exportkit {

// The class of an error for want of memory, which exportkit/errors.py leaves to Python.
inline constexpr ErrorClass kMemory{"MemoryError", EXPORTKIT_MEMORY_ERROR};

// Handles the exception that is being handled: makes *error unless `error` is null, and returns the code.
int failed(exportkit_error** error) noexcept;

// Runs the body of a function of the C interface.
template <class Body>
int attempt(exportkit_error** error, const Body& body) noexcept {
  if (error != nullptr) *error = nullptr;
  try {
    body();
    return EXPORTKIT_OK;
  } catch (...) {
    return failed(error);
  }
}

// UsageError if the pointer is null.
template <class Pointer>
Pointer not_null(Pointer pointer, const char* name) {
  if (pointer == nullptr) throw Error(errors::kUsage, std::string(name) + " must not be null");
  return pointer;
}

}  // namespace exportkit
