#include "runtime/c_api_calls.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>

#include "runtime/handles.h"
#include "runtime/inputs.h"
#include "runtime/joined_steps.h"

namespace exportkit {
namespace {

using c10::impl::VirtualGuardImpl;

constexpr size_t kLeastRunOptions = 24;  // the size of the structure when it was first released
constexpr intptr_t kLegacyStream = 1;    // cudaStreamLegacy, another name of the default stream

// The calling thread's, of torch's pool.
c10::Stream own_stream(c10::Device device) {
  thread_local std::map<c10::DeviceIndex, c10::Stream> streams;
  const auto known = streams.find(device.index());
  if (known != streams.end()) return known->second;
  return streams.emplace(device.index(), VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)).first->second;
}

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  const auto* begin = static_cast<const char*>(one.storage().data());
  const auto* address = static_cast<const char*>(other.storage().data());
  return address >= begin && address < begin + one.storage().nbytes();
}

std::vector<at::Tensor> borrowed(const DLTensor* const* given, size_t count, const MethodInfo& method,
                                 c10::Device device) {
  check_count(method.inputs, count);
  if (count > 0) not_null(given, "inputs");
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < count; ++i) inputs.push_back(borrow(given[i], method.inputs[i].name, device));
  return inputs;
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

exportkit_run_options run_options(const exportkit_run_options* given, uint64_t known_flags) {
  return read(given, kLeastRunOptions, known_flags, "exportkit_run_options");
}

OnStream::OnStream(const Model& model, const exportkit_run_options& options) {
  const c10::Device device = model.device();
  const bool own = (options.flags & EXPORTKIT_OWN_STREAM) != 0;
  if (options.stream == nullptr) {
    if (own && device.is_cuda()) guard_.emplace(own_stream(device));
    return;
  }
  if (!device.is_cuda()) throw Error(errors::kUsage, "stream must be null: the model is on " + device.str());
  if (own) throw Error(errors::kUsage, "stream must be null where EXPORTKIT_OWN_STREAM is set");
  const auto address = reinterpret_cast<intptr_t>(options.stream);
  // torch's number of a stream that it did not make is the stream's address, and 0 is the default stream.
  const c10::StreamId stream = address == kLegacyStream ? 0 : address;
  guard_.emplace(c10::Stream(c10::Stream::UNSAFE, device, stream));
}

void run_for(const Model& model, Session* session, const char* name, const DLTensor* const* given, size_t input_count,
             Results& results, size_t output_count, const exportkit_run_options* options) {
  const MethodInfo& method = method_named(model, name);
  results.expect(method.outputs.size(), output_count, "outputs");
  const exportkit_run_options asked = run_options(options);
  const OnStream on_stream(model, asked);
  const bool on_host = (asked.flags & EXPORTKIT_HOST_TENSORS) != 0;
  const bool contiguous = (asked.flags & EXPORTKIT_CONTIGUOUS_OUTPUTS) != 0;
  const std::vector<at::Tensor> inputs = borrowed(given, input_count, method, model.device());
  std::vector<at::Tensor> on_device = inputs;
  for (at::Tensor& input : on_device) {
    if (on_host) input = input.to(model.device());
  }
  std::vector<at::Tensor> outputs =
      session == nullptr ? model.run(method.name, on_device) : session->run(method.name, on_device);
  if (on_host) session == nullptr ? model.synchronize() : session->synchronize();
  check_outputs(method, outputs, -1);
  for (size_t i = 0; i < inputs.size(); ++i) {
    // What the call wrote on the device.
    if (method.inputs[i].written && !inputs[i].is_same(on_device[i])) inputs[i].copy_(on_device[i]);
  }
  for (at::Tensor& output : outputs) {
    if (on_host) output = output.to(c10::kCPU);
    if (contiguous) output = output.contiguous();
    // The caller may free the inputs before the outputs.
    const auto shares = [&](const at::Tensor& input) { return share_memory(input, output); };
    if (std::any_of(inputs.begin(), inputs.end(), shares)) output = output.clone();
  }
  results.give(lend_all(outputs));
}

}  // namespace exportkit
