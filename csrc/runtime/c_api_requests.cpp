// Several requests in one call of the C interface.
#include "package/text.h"
#include "runtime/c_api_calls.h"
#include "runtime/c_api_errors.h"
#include "runtime/request_run.h"
#include "runtime/tried_rows.h"

namespace exportkit {
namespace {

constexpr size_t kLeastAnswers = 32;  // the size of the structure when it was first released

exportkit_answers answers_of(const exportkit_answers* given) {
  const exportkit_answers answers = members(not_null(given, "answers"), kLeastAnswers, "exportkit_answers");
  not_null(answers.place, "place");
  return answers;
}

// UsageError if a request has no room for its own error. It concerns all requests then.
std::span<exportkit_request* const> requests_of(exportkit_request* const* given, size_t count) {
  if (count > 0) not_null(given, "requests");
  for (size_t i = 0; i < count; ++i) {
    const std::string name = "requests[" + std::to_string(i) + "]";
    exportkit_request& request = *not_null(given[i], name.c_str());
    if (request.size < sizeof request || request.size > kMostBytes) {
      throw Error(errors::kUsage, concat(name, ".size must be sizeof(exportkit_request), got ", request.size));
    }
    request.error = nullptr;
  }
  return {given, count};
}

void check_method(const MethodInfo& method) {
  for (const TensorInfo& input : method.inputs) {
    if (!input.written) continue;
    throw Error(errors::kUsage,
                method.name + " writes into its input `" + input.name + "`, which a request does not get back",
                "exportkit_run_method runs it.");
  }
}

}  // namespace
}  // namespace exportkit

using namespace exportkit;

int exportkit_run_requests(exportkit_model model, const char* method, exportkit_request* const* requests,
                           size_t request_count, int64_t most, const exportkit_answers* answers,
                           const exportkit_run_options* options, exportkit_error** error) noexcept {
  return attempt(error, [&] {
    const std::span<exportkit_request* const> given = requests_of(requests, request_count);
    const std::shared_ptr<OpenModel> open = find_model(model);
    const MethodInfo& named = method_named(open->model, method);
    check_method(named);
    if (most < 0) throw Error(errors::kUsage, "most must not be negative, got " + std::to_string(most));
    const exportkit_answers where = answers_of(answers);
    const OnStream on_stream(open->model, run_options(options, EXPORTKIT_OWN_STREAM));
    RequestRun(*open, model, named, given, where)(most);
  });
}

int exportkit_try_rows(exportkit_model model, const char* method, int64_t most, int64_t* rows, const char** reason,
                       exportkit_error** error) noexcept {
  if (rows != nullptr) *rows = 0;
  if (reason != nullptr) *reason = nullptr;
  return attempt(error, [&] {
    not_null(rows, "rows"), not_null(reason, "reason");
    const std::shared_ptr<OpenModel> open = find_model(model);
    const MethodInfo& named = method_named(open->model, method);
    if (most < 0) throw Error(errors::kUsage, "most must not be negative, got " + std::to_string(most));
    const TriedRows tried = try_rows(open->model, named, most);
    if (tried.most == 0) *reason = open->texts.keep(tried.reason);
    *rows = tried.most;
  });
}
