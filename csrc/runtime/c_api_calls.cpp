#include "runtime/c_api_calls.h"

#include <ATen/Functions.h>

#include "runtime/handles.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

constexpr size_t kLeastRunOptions = 24;  // the size of the structure when it was first released
constexpr intptr_t kLegacyStream = 1;    // cudaStreamLegacy, another name of the default stream

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  const auto* begin = static_cast<const char*>(one.storage().data());
  const auto* address = static_cast<const char*>(other.storage().data());
  return address >= begin && address < begin + one.storage().nbytes();
}

}  // namespace

std::shared_ptr<OpenModel> find_model(exportkit_model handle) {
  auto open = handles<OpenModel>().get(static_cast<int64_t>(handle));
  if (open != nullptr) return open;
  throw Error(errors::kModelClosed, "handle " + std::to_string(handle) + " does not belong to an open model");
}

const MethodInfo& method_named(const Model& model, const char* name) {
  return name == nullptr ? model.default_method() : model.method(name);
}

std::vector<ManagedTensor> lend_all(const std::vector<at::Tensor>& tensors) {
  std::vector<ManagedTensor> lent;
  for (const at::Tensor& tensor : tensors) lent.push_back(lend(tensor));
  return lent;
}

RequestedRun::RequestedRun(const Model& model, const MethodInfo& method, const exportkit_run_options* options)
    : model_(model),
      method_(method),
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

std::vector<at::Tensor> RequestedRun::borrowed(const DLTensor* const* given, size_t count) const {
  check_count(method_.inputs, count);
  if (count > 0) not_null(given, "inputs");
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < count; ++i) inputs.push_back(borrow(given[i], method_.inputs[i].name, model_.device()));
  return inputs;
}

std::vector<at::Tensor> RequestedRun::moved(std::vector<at::Tensor> inputs) const {
  for (at::Tensor& input : inputs) {
    if (host_tensors()) input = input.to(model_.device());
  }
  return inputs;
}

void RequestedRun::check_outputs(const std::vector<at::Tensor>& outputs) const {
  if (outputs.size() == method_.outputs.size()) return;
  throw Error(errors::kModelRun, "the compiled code returned " + std::to_string(outputs.size()) +
                                     " tensors; the manifest lists " + std::to_string(method_.outputs.size()));
}

std::vector<at::Tensor> RequestedRun::for_caller(std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs,
                                                 const std::vector<at::Tensor>& on_device) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    // What the call wrote on the device.
    if (method_.inputs[i].written && !inputs[i].is_same(on_device[i])) inputs[i].copy_(on_device[i]);
  }
  for (at::Tensor& output : outputs) {
    if (host_tensors()) output = output.to(c10::kCPU);
    if ((options_.flags & EXPORTKIT_CONTIGUOUS_OUTPUTS) != 0) output = output.contiguous();
    // The caller may free the inputs before the outputs.
    const auto shares = [&](const at::Tensor& input) { return share_memory(input, output); };
    if (std::any_of(inputs.begin(), inputs.end(), shares)) output = output.clone();
  }
  return outputs;
}

}  // namespace exportkit
