// The C interface: exportkit.h over runtime.h.
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "exportkit/exportkit.h"
#include "exportkit/runtime.h"
#include "package/errors.h"
#include "runtime/c_api_description.h"
#include "runtime/c_api_errors.h"
#include "runtime/dlpack_tensors.h"
#include "runtime/handles.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

// Strings of a model stay where they are: the description points to them.
struct OpenModel {
  Model model;
  Description description{model};

  explicit OpenModel(Model opened) : model(std::move(opened)) {}
};

// ModelClosedError if there is none.
std::shared_ptr<OpenModel> found(std::shared_ptr<OpenModel> open, exportkit_model handle) {
  if (open != nullptr) return open;
  throw Error(errors::kModelClosed, "handle " + std::to_string(handle) + " does not belong to an open model");
}

std::shared_ptr<OpenModel> find(exportkit_model handle) {
  return found(handles<OpenModel>().get(static_cast<int64_t>(handle)), handle);
}

// --- options ---------------------------------------------------------------------------------------------------------

constexpr size_t kMostBytes = 4096;  // of a structure; a size that was never set is probably greater

// Options of a caller whose header is older or newer. Members that the caller does not have are zero, and those that
// this library does not have must be.
template <class Options>
Options read(const Options* given, size_t least, uint64_t known_flags, const char* name) {
  Options options{};
  if (given == nullptr) return options;
  if (given->size < least || given->size > kMostBytes) {
    throw Error(errors::kUsage,
                std::string(name) + ".size must be sizeof(" + name + "), got " + std::to_string(given->size));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  const size_t common = std::min(given->size, sizeof options);
  if (std::any_of(bytes + common, bytes + given->size, [](unsigned char byte) { return byte != 0; })) {
    throw Error(errors::kUsage, std::string(name) + " has members that exportkit " + EXPORTKIT_VERSION " does not know",
                "Use the library of the header's version, or leave the new members zero.");
  }
  std::memcpy(&options, given, common);
  if ((options.flags & ~known_flags) != 0) {
    throw Error(errors::kUsage,
                std::string(name) + ".flags has flags that exportkit " +
                    EXPORTKIT_VERSION " does not know: " + std::to_string(options.flags & ~known_flags));
  }
  return options;
}

// The sizes of the structures when they were first released.
constexpr size_t kLeastOpenOptions = 80, kLeastRunOptions = 24;

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
  if ((c.flags & EXPORTKIT_VERIFY_ALWAYS) != 0) options.verify = Verify::kAlways;
  if ((c.flags & EXPORTKIT_CUDA_GRAPHS) != 0) options.cuda_graphs = CudaGraphs::kOnFirstUse;
  if (c.warn != nullptr) {
    options.warn = [warn = c.warn, context = c.warn_context](const std::string& warning) {
      warn(warning.c_str(), context);
    };
  }
  return options;
}

// --- tensors ---------------------------------------------------------------------------------------------------------

// Where a caller gets tensors: zeros until all of them are there.
class Results {
 public:
  Results(DLManagedTensorVersioned** places, size_t count) : places_(places), count_(places == nullptr ? 0 : count) {
    std::fill_n(places_, count_, nullptr);
  }

  // UsageError if the caller gave another number of places.
  void expect(size_t wanted, size_t count, const char* name) const {
    if (count > 0) not_null(places_, name);
    if (count == wanted) return;
    throw Error(errors::kUsage, std::string(name) + " must have room for " + std::to_string(wanted) + " tensors, got " +
                                    std::to_string(count));
  }

  // Nothing if the caller gave no places.
  void give(std::vector<ManagedTensor> tensors) noexcept {
    for (size_t i = 0; i < count_; ++i) places_[i] = tensors[i].release();
  }

 private:
  DLManagedTensorVersioned** places_;
  size_t count_;
};

std::vector<ManagedTensor> lend_all(const std::vector<at::Tensor>& tensors) {
  std::vector<ManagedTensor> lent;
  for (const at::Tensor& tensor : tensors) lent.push_back(lend(tensor));
  return lent;
}

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  const auto* begin = static_cast<const char*>(one.storage().data());
  const auto* address = static_cast<const char*>(other.storage().data());
  return address >= begin && address < begin + one.storage().nbytes();
}

constexpr intptr_t kLegacyStream = 1;  // cudaStreamLegacy, another name of the default stream

// A call as its options say.
class RequestedRun {
 public:
  RequestedRun(const Model& model, const exportkit_run_options* options)
      : model_(model),
        options_(read(options, kLeastRunOptions, EXPORTKIT_HOST_TENSORS | EXPORTKIT_CONTIGUOUS_OUTPUTS,
                      "exportkit_run_options")) {
    if (options_.stream == nullptr) return;
    if (!model_.device().is_cuda()) {
      throw Error(errors::kUsage, "stream must be null: the model is on " + model_.device().str());
    }
    const auto address = reinterpret_cast<intptr_t>(options_.stream);
    // torch's number of a stream that it did not make is the stream's address, and 0 is the default stream.
    const c10::StreamId stream = address == kLegacyStream ? 0 : address;
    stream_.emplace(c10::Stream(c10::Stream::UNSAFE, model_.device(), stream));
  }

  std::vector<at::Tensor> operator()(const DLTensor* const* given, size_t count) const {
    const std::vector<at::Tensor> inputs = borrowed(given, count);
    std::vector<at::Tensor> outputs = model_.run(on_device(inputs));
    if (outputs.size() != model_.outputs().size()) {
      throw Error(errors::kModelRun, "the compiled code returned " + std::to_string(outputs.size()) +
                                         " tensors; the manifest lists " + std::to_string(model_.outputs().size()));
    }
    for (at::Tensor& output : outputs) output = for_caller(output, inputs);
    return outputs;
  }

 private:
  bool host_tensors() const { return (options_.flags & EXPORTKIT_HOST_TENSORS) != 0; }

  std::vector<at::Tensor> borrowed(const DLTensor* const* given, size_t count) const {
    check_count(model_.inputs(), count);
    if (count > 0) not_null(given, "inputs");
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < count; ++i) inputs.push_back(borrow(given[i], model_.inputs()[i].name, model_.device()));
    return inputs;
  }

  std::vector<at::Tensor> on_device(std::vector<at::Tensor> inputs) const {
    for (at::Tensor& input : inputs) {
      if (host_tensors()) input = input.to(model_.device());
    }
    return inputs;
  }

  // The caller may free the inputs before the outputs.
  at::Tensor for_caller(at::Tensor output, const std::vector<at::Tensor>& inputs) const {
    if (host_tensors()) output = output.to(c10::kCPU);
    if ((options_.flags & EXPORTKIT_CONTIGUOUS_OUTPUTS) != 0) output = output.contiguous();
    const auto shares = [&](const at::Tensor& input) { return share_memory(input, output); };
    return std::any_of(inputs.begin(), inputs.end(), shares) ? output.clone() : output;
  }

  const Model& model_;
  const exportkit_run_options options_;
  std::optional<c10::StreamGuard> stream_;
};

// --- cases -----------------------------------------------------------------------------------------------------------

void check_case(const Model& model, size_t index) {
  if (index < model.case_count()) return;
  throw Error(errors::kUsage, "index must be less than " + std::to_string(model.case_count()) +
                                  ", the number of recorded cases; got " + std::to_string(index));
}

std::string differences(const CaseReport& report) {
  std::string text = report.problem;
  for (const OutputReport& output : report.outputs) {
    if (!output.ok()) text += (text.empty() ? "" : "; ") + output.text();
  }
  return text;
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
  if (model != nullptr) *model = 0;
  return attempt(error, [&] {
    not_null(model, "model");
    Model opened = Model::open(not_null(path, "path"), open_options(options));
    *model = static_cast<exportkit_model>(handles<OpenModel>().add(std::make_shared<OpenModel>(std::move(opened))));
  });
}

int exportkit_close(exportkit_model model, exportkit_error** error) noexcept {
  return attempt(error, [&] { found(handles<OpenModel>().remove(static_cast<int64_t>(model)), model); });
}

int exportkit_describe(exportkit_model model, const exportkit_description** description,
                       exportkit_error** error) noexcept {
  if (description != nullptr) *description = nullptr;
  return attempt(error, [&] { *not_null(description, "description") = &find(model)->description.c(); });
}

int exportkit_run(exportkit_model model, const DLTensor* const* inputs, size_t input_count,
                  DLManagedTensorVersioned** outputs, size_t output_count, const exportkit_run_options* options,
                  exportkit_error** error) noexcept {
  Results results(outputs, output_count);
  return attempt(error, [&] {
    const std::shared_ptr<OpenModel> open = find(model);
    results.expect(open->model.outputs().size(), output_count, "outputs");
    results.give(lend_all(RequestedRun(open->model, options)(inputs, input_count)));
  });
}

int exportkit_swap_weights(exportkit_model model, const char* path, exportkit_error** error) noexcept {
  return attempt(error, [&] { find(model)->model.swap_weights(not_null(path, "path")); });
}

int exportkit_read_case(exportkit_model model, size_t index, DLManagedTensorVersioned** inputs, size_t input_count,
                        DLManagedTensorVersioned** outputs, size_t output_count, exportkit_error** error) noexcept {
  Results given(inputs, input_count), expected(outputs, output_count);
  return attempt(error, [&] {
    const std::shared_ptr<OpenModel> open = find(model);
    check_case(open->model, index);
    if (inputs != nullptr || input_count > 0) given.expect(open->model.inputs().size(), input_count, "inputs");
    if (outputs != nullptr || output_count > 0) expected.expect(open->model.outputs().size(), output_count, "outputs");
    const RecordedCase recorded = open->model.recorded_case(index);
    std::vector<ManagedTensor> lent_inputs = lend_all(recorded.inputs), lent_outputs = lend_all(recorded.outputs);
    given.give(std::move(lent_inputs));
    expected.give(std::move(lent_outputs));
  });
}

int exportkit_replay(exportkit_model model, size_t index, exportkit_error** error) noexcept {
  return attempt(error, [&] {
    const std::shared_ptr<OpenModel> open = find(model);
    check_case(open->model, index);
    const CaseReport report = open->model.replay(index);
    if (report.ok()) return;
    throw Error(errors::kWrongResult,
                "case " + std::to_string(index) + " differs from the eager model: " + differences(report));
  });
}
