#include "runtime/c_api_errors.h"

#include <c10/util/Exception.h>

#include <cstring>
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

constexpr ErrorClass kOs{"OSError", 4}, kInternal{"InternalError", 5};

constexpr std::pair<ErrorClass, int> kCodes[] = {
    {errors::kExportkit, EXPORTKIT_ERROR},
    {errors::kWrongResult, EXPORTKIT_WRONG_RESULT_ERROR},
    {errors::kModelRun, EXPORTKIT_MODEL_RUN_ERROR},
    {errors::kRefusedValue, EXPORTKIT_REFUSED_VALUE_ERROR},
    {errors::kModelClosed, EXPORTKIT_MODEL_CLOSED_ERROR},
    {errors::kSessionBusy, EXPORTKIT_SESSION_BUSY_ERROR},
    {errors::kSessionBroken, EXPORTKIT_SESSION_BROKEN_ERROR},
    {errors::kSessionClosed, EXPORTKIT_SESSION_CLOSED_ERROR},
    {errors::kUsage, EXPORTKIT_USAGE_ERROR},
    {errors::kInput, EXPORTKIT_INPUT_ERROR},
    {errors::kWeights, EXPORTKIT_WEIGHTS_ERROR},
    {errors::kState, EXPORTKIT_STATE_ERROR},
    {errors::kNotAnArchive, EXPORTKIT_NOT_AN_ARCHIVE_ERROR},
    {errors::kNoManifest, EXPORTKIT_NO_MANIFEST_ERROR},
    {errors::kArchiveLayout, EXPORTKIT_ARCHIVE_LAYOUT_ERROR},
    {errors::kStockRecord, EXPORTKIT_STOCK_RECORD_ERROR},
    {errors::kDuplicateRecord, EXPORTKIT_DUPLICATE_RECORD_ERROR},
    {errors::kUnsafeRecordName, EXPORTKIT_UNSAFE_RECORD_NAME_ERROR},
    {errors::kManifestTooLarge, EXPORTKIT_MANIFEST_TOO_LARGE_ERROR},
    {errors::kManifestSyntax, EXPORTKIT_MANIFEST_SYNTAX_ERROR},
    {errors::kFormatVersion, EXPORTKIT_FORMAT_VERSION_ERROR},
    {errors::kManifestConsistency, EXPORTKIT_MANIFEST_CONSISTENCY_ERROR},
    {errors::kMissingRecord, EXPORTKIT_MISSING_RECORD_ERROR},
    {errors::kUnlistedRecord, EXPORTKIT_UNLISTED_RECORD_ERROR},
    {errors::kDigestMismatch, EXPORTKIT_DIGEST_MISMATCH_ERROR},
    {errors::kMissingLibrary, EXPORTKIT_MISSING_LIBRARY_ERROR},
    {errors::kSchemaChanged, EXPORTKIT_SCHEMA_CHANGED_ERROR},
    {errors::kLibraryConflict, EXPORTKIT_LIBRARY_CONFLICT_ERROR},
    {errors::kLibraryLoad, EXPORTKIT_LIBRARY_LOAD_ERROR},
    {errors::kSignatureMissing, EXPORTKIT_SIGNATURE_MISSING_ERROR},
    {errors::kSignature, EXPORTKIT_SIGNATURE_ERROR},
    {errors::kCase, EXPORTKIT_CASE_ERROR},
    {errors::kRevoked, EXPORTKIT_REVOKED_ERROR},
    {errors::kArtifact, EXPORTKIT_ARTIFACT_ERROR},
    {errors::kHost, EXPORTKIT_HOST_ERROR},
    {errors::kNoTarget, EXPORTKIT_NO_TARGET_ERROR},
    {errors::kTorchVersion, EXPORTKIT_TORCH_VERSION_ERROR},
    {errors::kModelLoad, EXPORTKIT_MODEL_LOAD_ERROR},
    {errors::kCache, EXPORTKIT_CACHE_ERROR},
    {errors::kPolicy, EXPORTKIT_POLICY_ERROR},
    {kOs, EXPORTKIT_OS_ERROR},
    {kMemory, EXPORTKIT_MEMORY_ERROR},
    {kInternal, EXPORTKIT_INTERNAL_ERROR},
};

// The code of a class. A class without a code has the code of its exit code, such as 300.
int code_of(const char* name, int exit_code) {
  for (const auto& [kind, code] : kCodes) {
    if (std::strcmp(kind.name, name) == 0) return code;
  }
  return 100 * exit_code;
}

// The error for a call that finds no memory for an error. It is never freed.
exportkit_error& out_of_memory() {
  static auto& error = *new exportkit_error{EXPORTKIT_MEMORY_ERROR, kMemory.name, "there is not enough memory", {}};
  return error;
}
[[maybe_unused]] const exportkit_error& made_at_load = out_of_memory();

// Texts are UTF-8, although the path in a message need not be.
std::string as_utf8(const std::string& text) { return is_utf8(text) ? text : printable(text); }

exportkit_error* make(const ErrorClass& kind, const std::string& message, const std::string& hint = {}) {
  return new exportkit_error{code_of(kind.name, kind.exit_code), kind.name, as_utf8(message), as_utf8(hint)};
}

// Makes the error of the exception that is being handled: std::bad_alloc.
exportkit_error* describe_exception() {
  try {
    throw;
  } catch (const Error& error) {
    return make({error.name(), error.exit_code()}, error.message(), error.hint());
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
