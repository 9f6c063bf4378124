// Within the backend, what fails throws. Its functions that Triton calls turn that into Triton's errors.
#pragma once

#include <exportkit/exportkit.h>

#include <stdexcept>
#include <string>

#include "package/text.h"
#include "triton/triton_interface.h"

namespace exportkit::triton {

struct Failure : std::runtime_error {
  // `parts` make the message.
  template <class... Parts>
  Failure(TRITONSERVER_Error_Code code, const Parts&... parts) : std::runtime_error(concat(parts...)), code(code) {}

  TRITONSERVER_Error_Code code;
};

// What Triton or exportkit says, which is freed. The text of exportkit's has its class and its hint.
Failure failure(TRITONSERVER_Error* error);
Failure failure(exportkit_error* error);

// Throws the error, if there is one.
template <class Error>
void check(Error* error) {
  if (error != nullptr) throw failure(error);
}

// Calls a function of exportkit, whose last argument is an error.
template <class Result, class... Parameters, class... Given>
void call(Result (*function)(Parameters...), Given... given) {
  exportkit_error* error = nullptr;
  function(given..., &error);
  check(error);
}

// The exception that is being handled, as Triton's error.
TRITONSERVER_Error* caught() noexcept;

void log(TRITONSERVER_LogLevel level, const std::string& text) noexcept;

// Logs what cannot be told to anybody else.
void ignore(TRITONSERVER_Error* error) noexcept;

}  // namespace exportkit::triton
