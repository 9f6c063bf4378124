// The C interface: exportkit.h over runtime.h.
#include "exportkit/exportkit.h"
#include "exportkit/runtime.h"
#include "package/errors.h"
#include "package/text.h"
#include "runtime/c_api_calls.h"
#include "runtime/c_api_errors.h"
#include "runtime/handles.h"

namespace exportkit {
namespace {

// --- options ---------------------------------------------------------------------------------------------------------

constexpr size_t kLeastOpenOptions = 80;  // the size of the structure when it was first released

OpenOptions open_options(const exportkit_open_options* given) {
  const auto c =
      read(given, kLeastOpenOptions, EXPORTKIT_VERIFY_ALWAYS | EXPORTKIT_CUDA_GRAPHS, "exportkit_open_options");
  OpenOptions options;
  if (c.device != nullptr) options.device = c.device;
  if (c.target != nullptr) options.target = c.target;
  if (c.runners != 0) options.runners = c.runners;
  for (size_t i = 0; i < c.public_key_count; ++i) {
    options.public_keys.emplace_back(not_null(not_null(c.public_keys, "public_keys")[i], "an element of public_keys"));
  }
  if (c.signature != nullptr) options.signature = c.signature;
  if (c.signature_content_size > 0) {
    options.signature_content.assign(not_null(c.signature_content, "signature_content"), c.signature_content_size);
  }
  options.threads = c.threads;
  if (c.stream_limit != 0) options.stream_limit = c.stream_limit;
  if ((c.flags & EXPORTKIT_VERIFY_ALWAYS) != 0) options.verify = Verify::kAlways;
  if ((c.flags & EXPORTKIT_CUDA_GRAPHS) != 0) options.cuda_graphs = CudaGraphs::kOnFirstUse;
  if (c.warn != nullptr) {
    options.warn = [warn = c.warn, context = c.warn_context](const std::string& warning) {
      warn(warning.c_str(), context);
    };
  }
  return options;
}

// Gives the handle of the model that `open` opens.
template <class Open>
int give_model(exportkit_model* model, exportkit_error** error, const Open& open) noexcept {
  if (model != nullptr) *model = 0;
  return attempt(error, [&] {
    not_null(model, "model");
    *model = static_cast<exportkit_model>(handles<OpenModel>().add(std::make_shared<OpenModel>(open())));
  });
}

// --- cases -----------------------------------------------------------------------------------------------------------

void check_case(const Model& model, size_t index) {
  if (index < model.case_count()) return;
  throw Error(errors::kUsage, "index must be less than " + std::to_string(model.case_count()) +
                                  ", the number of recorded cases; got " + std::to_string(index));
}

// UsageError if the case has no call of this number.
const RecordedCall& checked_call(const RecordedCase& recorded, size_t index, size_t call) {
  if (call < recorded.calls.size()) return recorded.calls[call];
  throw Error(errors::kUsage, concat("call must be less than ", recorded.calls.size(), ", the number of calls in case ",
                                     index, "; got ", call));
}

std::string differences(const CaseReport& report) {
  std::vector<std::string> found;
  const auto add = [&](const std::vector<OutputReport>& outputs) {
    for (const OutputReport& output : outputs) {
      if (!output.ok()) found.push_back(output.text());
    }
  };
  for (const CallReport& call : report.calls) {
    if (!call.problem.empty()) found.push_back(call.problem);
    add(call.outputs);
  }
  add(report.state);
  return joined(found, "; ");
}

}  // namespace
}  // namespace exportkit

using namespace exportkit;

uint32_t exportkit_abi_version(void) noexcept { return EXPORTKIT_ABI_VERSION; }
const char* exportkit_version(void) noexcept { return EXPORTKIT_VERSION; }
const char* exportkit_torch_version(void) noexcept {
  static const std::string version = torch_version();
  return version.c_str();
}

int exportkit_open(const char* path, const exportkit_open_options* options, exportkit_model* model,
                   exportkit_error** error) noexcept {
  return give_model(model, error, [&] { return Model::open(not_null(path, "path"), open_options(options)); });
}

int exportkit_open_bytes(const void* bytes, size_t size, const exportkit_open_options* options, exportkit_model* model,
                         exportkit_error** error) noexcept {
  return give_model(model, error, [&] {
    const auto* const content = static_cast<const std::byte*>(not_null(bytes, "bytes"));
    return Model::open(std::span(content, size), open_options(options));
  });
}

int exportkit_open_descriptor(int descriptor, const exportkit_open_options* options, exportkit_model* model,
                              exportkit_error** error) noexcept {
  return give_model(model, error, [&] { return Model::open_descriptor(descriptor, open_options(options)); });
}

int exportkit_close(exportkit_model model, exportkit_error** error) noexcept {
  return attempt(error, [&] {
    find_model(model);
    const auto open = handles<OpenModel>().remove(static_cast<int64_t>(model));
    close_sessions(model);
  });
}

int exportkit_describe(exportkit_model model, const exportkit_description** description,
                       exportkit_error** error) noexcept {
  if (description != nullptr) *description = nullptr;
  return attempt(error, [&] { *not_null(description, "description") = &find_model(model)->description.c(); });
}

int exportkit_run(exportkit_model model, const DLTensor* const* inputs, size_t input_count,
                  DLManagedTensorVersioned** outputs, size_t output_count, const exportkit_run_options* options,
                  exportkit_error** error) noexcept {
  return exportkit_run_method(model, nullptr, inputs, input_count, outputs, output_count, options, error);
}

int exportkit_run_method(exportkit_model model, const char* method, const DLTensor* const* inputs, size_t input_count,
                         DLManagedTensorVersioned** outputs, size_t output_count, const exportkit_run_options* options,
                         exportkit_error** error) noexcept {
  Results results(outputs, output_count);
  return attempt(error, [&] {
    const std::shared_ptr<OpenModel> open = find_model(model);
    run_for(open->model, nullptr, method, inputs, input_count, results, output_count, options);
  });
}

int exportkit_synchronize(exportkit_model model, const exportkit_run_options* options,
                          exportkit_error** error) noexcept {
  return attempt(error, [&] {
    const std::shared_ptr<OpenModel> open = find_model(model);
    const OnStream on_its_stream(open->model, run_options(options));
    open->model.synchronize();
  });
}

int exportkit_swap_weights(exportkit_model model, const char* path, exportkit_error** error) noexcept {
  return attempt(error, [&] { find_model(model)->model.swap_weights(not_null(path, "path")); });
}

int exportkit_read_case(exportkit_model model, size_t index, DLManagedTensorVersioned** inputs, size_t input_count,
                        DLManagedTensorVersioned** outputs, size_t output_count, exportkit_error** error) noexcept {
  return exportkit_read_call(model, index, 0, inputs, input_count, outputs, output_count, error);
}

int exportkit_read_call(exportkit_model model, size_t index, size_t call, DLManagedTensorVersioned** inputs,
                        size_t input_count, DLManagedTensorVersioned** outputs, size_t output_count,
                        exportkit_error** error) noexcept {
  Results given(inputs, input_count), expected(outputs, output_count);
  return attempt(error, [&] {
    const std::shared_ptr<OpenModel> open = find_model(model);
    check_case(open->model, index);
    const RecordedCase recorded = open->model.recorded_case(index);
    const RecordedCall& chosen = checked_call(recorded, index, call);
    if (inputs != nullptr || input_count > 0) given.expect(chosen.inputs.size(), input_count, "inputs");
    if (outputs != nullptr || output_count > 0) expected.expect(chosen.outputs.size(), output_count, "outputs");
    std::vector<ManagedTensor> lent_inputs = lend_all(chosen.inputs), lent_outputs = lend_all(chosen.outputs);
    given.give(std::move(lent_inputs));
    expected.give(std::move(lent_outputs));
  });
}

int exportkit_replay(exportkit_model model, size_t index, exportkit_error** error) noexcept {
  return attempt(error, [&] {
    const std::shared_ptr<OpenModel> open = find_model(model);
    check_case(open->model, index);
    const CaseReport report = open->model.replay(index);
    if (report.ok()) return;
    throw Error(errors::kWrongResult, concat("case ", index, " differs from the eager model: ", differences(report)));
  });
}
