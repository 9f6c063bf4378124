#include "triton/errors.h"

namespace exportkit::triton {
namespace {

// 400 for what the client can mend, 503 for what passes, 500 for the rest: the codes of HTTP that Triton makes of
// these.
TRITONSERVER_Error_Code code_of(int code) {
  switch (code) {
    case EXPORTKIT_INPUT_ERROR:
    case EXPORTKIT_REFUSED_VALUE_ERROR:
    case EXPORTKIT_SESSION_CLOSED_ERROR:
    case EXPORTKIT_SESSION_BROKEN_ERROR:
      return TRITONSERVER_ERROR_INVALID_ARG;
    case EXPORTKIT_MEMORY_ERROR:
    case EXPORTKIT_SESSION_BUSY_ERROR:
    case EXPORTKIT_MODEL_CLOSED_ERROR:
      return TRITONSERVER_ERROR_UNAVAILABLE;
    default:
      return TRITONSERVER_ERROR_INTERNAL;
  }
}

}  // namespace

Failure failure(TRITONSERVER_Error* error) {
  Failure found(TRITONSERVER_ErrorCode(error), TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  return found;
}

Failure failure(exportkit_error* error) {
  std::string text = concat(exportkit_error_name(error), ": ", exportkit_error_message(error));
  if (const std::string hint = exportkit_error_hint(error); !hint.empty()) {
    text += (text.ends_with('.') ? " " : ". ") + hint;
  }
  Failure found(code_of(exportkit_error_code(error)), text);
  exportkit_error_free(error);
  return found;
}

TRITONSERVER_Error* caught() noexcept {
  try {
    throw;
  } catch (const Failure& failure) {
    return TRITONSERVER_ErrorNew(failure.code, failure.what());
  } catch (const std::bad_alloc&) {
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "exportkit: there is not enough memory");
  } catch (const std::exception& error) {
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, error.what());
  }
}

// Triton shows a place in the source, for which the backend's name stands.
void log(TRITONSERVER_LogLevel level, const std::string& text) noexcept {
  TRITONSERVER_ErrorDelete(TRITONSERVER_LogMessage(level, "exportkit", 0, text.c_str()));
}

void ignore(TRITONSERVER_Error* error) noexcept {
  if (error == nullptr) return;
  log(TRITONSERVER_LOG_ERROR, TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
}

}  // namespace exportkit::triton
