#include "runtime/c_api_errors.h"

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <system_error>

#include "package/text.h"

struct exportkit_error {
  int code;
  const char* name;
  std::string message, hint;
};

namespace exportkit {
namespace {

constexpr ErrorClass kOs{"OSError", EXPORTKIT_OS_ERROR}, kInternal{"InternalError", EXPORTKIT_INTERNAL_ERROR};

// The error for a call that finds no memory for an error. It is never freed.
exportkit_error& out_of_memory() {
  static auto& error = *new exportkit_error{kMemory.code, kMemory.name, "there is not enough memory", {}};
  return error;
}
[[maybe_unused]] const exportkit_error& made_at_load = out_of_memory();

// Texts are UTF-8, although the path in a message need not be.
std::string as_utf8(const std::string& text) { return is_utf8(text) ? text : printable(text); }

exportkit_error* make(const ErrorClass& kind, const std::string& message, const std::string& hint = {}) {
  return new exportkit_error{kind.code, kind.name, as_utf8(message), as_utf8(hint)};
}

// Makes the error of the exception that is being handled: std::bad_alloc.
exportkit_error* describe_exception() {
  try {
    throw;
  } catch (const Error& error) {
    return make(error.kind(), error.message(), error.hint());
  } catch (const std::system_error& error) {
    return make(kOs, error.what(), "The operating system reported this error.");
  } catch (const c10::OutOfMemoryError& error) {
    return make(kMemory, first_line(error.what_without_backtrace()));
  } catch (const c10::Error& error) {
    return make(kInternal, first_line(error.what_without_backtrace()), "This is a bug in exportkit. Please report it.");
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return make(kInternal, error.what(), "This is a bug in exportkit. Please report it.");
  } catch (...) {
    return make(kInternal, "an exception of an unknown class was thrown",
                "This is a bug in exportkit or in an operator. Please report it.");
  }
}

}  // namespace

int failed(exportkit_error** error) noexcept {
  exportkit_error* made = &out_of_memory();
  try {
    made = describe_exception();
  } catch (...) {  // there is no memory to describe the error
  }
  const int code = made->code;
  if (error != nullptr) {
    *error = made;
  } else {
    exportkit_error_free(made);
  }
  return code;
}

}  // namespace exportkit

int exportkit_error_code(const exportkit_error* error) noexcept {
  return error == nullptr ? EXPORTKIT_OK : error->code;
}
const char* exportkit_error_name(const exportkit_error* error) noexcept { return error == nullptr ? "" : error->name; }
const char* exportkit_error_message(const exportkit_error* error) noexcept {
  return error == nullptr ? "" : error->message.c_str();
}
const char* exportkit_error_hint(const exportkit_error* error) noexcept {
  return error == nullptr ? "" : error->hint.c_str();
}
void exportkit_error_free(exportkit_error* error) noexcept {
  if (error != &exportkit::out_of_memory()) delete error;
}
