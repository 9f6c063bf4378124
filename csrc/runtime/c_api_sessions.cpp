#include <algorithm>

#include "package/errors.h"
#include "runtime/c_api_calls.h"
#include "runtime/c_api_errors.h"
#include "runtime/handles.h"

namespace exportkit {
namespace {

// SessionClosedError if there is none.
std::shared_ptr<OpenSession> found(std::shared_ptr<OpenSession> open, exportkit_session handle) {
  if (open != nullptr) return open;
  throw Error(errors::kSessionClosed, "handle " + std::to_string(handle) + " does not belong to an open session",
              "It, or its model, was closed.");
}

exportkit_session add(OpenSession opened) {
  const exportkit_model model = opened.model;
  const int64_t handle = handles<OpenSession>().add(std::make_shared<OpenSession>(std::move(opened)));
  if (handles<OpenModel>().get(static_cast<int64_t>(model)) == nullptr) {  // it was closed meanwhile
    handles<OpenSession>().remove(handle);
    find_model(model);
  }
  return static_cast<exportkit_session>(handle);
}

std::map<std::string, int64_t> sizes_of(const exportkit_size* given, size_t count) {
  std::map<std::string, int64_t> sizes;
  if (count > 0) not_null(given, "sizes");
  for (size_t i = 0; i < count; ++i) {
    const std::string dimension = not_null(given[i].dimension, "a dimension of sizes");
    if (!sizes.emplace(dimension, given[i].size).second) {
      throw Error(errors::kUsage, "sizes must name each dimension once, got " + dimension + " twice");
    }
  }
  return sizes;
}

}  // namespace

std::shared_ptr<OpenSession> find_session(exportkit_session handle) {
  return found(handles<OpenSession>().get(static_cast<int64_t>(handle)), handle);
}

void close_sessions(exportkit_model model) {
  handles<OpenSession>().remove_if([&](const OpenSession& session) { return session.model == model; });
}

}  // namespace exportkit

using namespace exportkit;

int exportkit_open_session(exportkit_model model, const exportkit_size* sizes, size_t size_count,
                           exportkit_session* session, exportkit_error** error) noexcept {
  if (session != nullptr) *session = 0;
  return attempt(error, [&] {
    not_null(session, "session");
    const std::shared_ptr<OpenModel> open = find_model(model);
    *session = add({model, open->model, open->model.session(sizes_of(sizes, size_count))});
  });
}

int exportkit_session_run(exportkit_session session, const char* method, const DLTensor* const* inputs,
                          size_t input_count, DLManagedTensorVersioned** outputs, size_t output_count,
                          const exportkit_run_options* options, exportkit_error** error) noexcept {
  Results results(outputs, output_count);
  return attempt(error, [&] {
    const std::shared_ptr<OpenSession> open = find_session(session);
    run_for(open->of, &open->session, method, inputs, input_count, results, output_count, options);
  });
}

int exportkit_session_synchronize(exportkit_session session, const exportkit_run_options* options,
                                  exportkit_error** error) noexcept {
  return attempt(error, [&] {
    const std::shared_ptr<OpenSession> open = find_session(session);
    const OnStream on_its_stream(open->of, run_options(options));
    open->session.synchronize();
  });
}

int exportkit_session_fork(exportkit_session session, exportkit_session* copy, exportkit_error** error) noexcept {
  if (copy != nullptr) *copy = 0;
  return attempt(error, [&] {
    not_null(copy, "copy");
    const std::shared_ptr<OpenSession> open = find_session(session);
    *copy = add({open->model, open->of, open->session.fork()});
  });
}

int exportkit_session_reset(exportkit_session session, exportkit_error** error) noexcept {
  return attempt(error, [&] { find_session(session)->session.reset(); });
}

int exportkit_session_save(exportkit_session session, const char* path, exportkit_error** error) noexcept {
  return attempt(error, [&] { find_session(session)->session.save(not_null(path, "path")); });
}

int exportkit_session_load_state(exportkit_session session, const char* path, exportkit_error** error) noexcept {
  return attempt(error, [&] { find_session(session)->session.load_state(not_null(path, "path")); });
}

int exportkit_session_load_partial_state(exportkit_session session, const char* path, int64_t row, uint8_t* set,
                                         size_t count, exportkit_error** error) noexcept {
  return attempt(error, [&] {
    const std::shared_ptr<OpenSession> open = find_session(session);
    const std::vector<TensorInfo>& known = open->of.state();
    if (set != nullptr && count != known.size()) {
      throw Error(errors::kUsage,
                  "the state has " + std::to_string(known.size()) + " tensors; got room for " + std::to_string(count));
    }
    const auto one = row == -1 ? std::nullopt : std::optional(row);
    const std::vector<std::string> names = open->session.load_partial_state(not_null(path, "path"), one);
    for (size_t i = 0; set != nullptr && i < count; ++i) {
      set[i] = std::ranges::find(names, known[i].name) != names.end() ? 1 : 0;
    }
  });
}

int exportkit_session_state(exportkit_session session, DLManagedTensorVersioned** tensors, size_t count,
                            exportkit_error** error) noexcept {
  Results results(tensors, count);
  return attempt(error, [&] {
    const std::shared_ptr<OpenSession> open = find_session(session);
    const auto state = open->session.state();
    results.expect(state.size(), count, "tensors");
    std::vector<ManagedTensor> lent;
    for (const auto& [name, tensor] : state) lent.push_back(lend(tensor));
    results.give(std::move(lent));
  });
}

int exportkit_session_bytes(exportkit_session session, uint64_t* bytes, exportkit_error** error) noexcept {
  if (bytes != nullptr) *bytes = 0;
  return attempt(error, [&] {
    not_null(bytes, "bytes");
    *bytes = static_cast<uint64_t>(find_session(session)->session.state_bytes());
  });
}

int exportkit_session_close(exportkit_session session, exportkit_error** error) noexcept {
  return attempt(error, [&] { found(handles<OpenSession>().remove(static_cast<int64_t>(session)), session); });
}
