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

// --- descriptions ----------------------------------------------------------------------------------------------------

template <class Kept>
const Kept& Description::keep(Kept kept) {
  const auto moved = std::make_shared<const Kept>(std::move(kept));
  kept_.push_back(moved);
  return *moved;
}

template <class Structure>
const Structure* const* Description::pointers(std::vector<Structure> structures) {
  std::vector<const Structure*> all;
  for (const Structure& each : keep(std::move(structures))) all.push_back(&each);
  return keep(std::move(all)).data();
}

const exportkit_tensor_info* const* Description::tensors(const std::vector<TensorInfo>& described) {
  std::vector<exportkit_tensor_info> infos;
  for (const TensorInfo& tensor : described) {
    std::vector<exportkit_size_range> shape;
    for (const SizeRange& size : tensor.shape) {
      const int64_t dimension = size.dimension ? static_cast<int64_t>(*size.dimension) : -1;
      shape.push_back({size.min, size.max, size.step, size.text.c_str(), dimension, size.scale, size.offset});
    }
    infos.push_back({tensor.name.c_str(), tensor.dtype.c_str(), dl_dtype(dtype_of(tensor.dtype)),
                     static_cast<int32_t>(tensor.shape.size()), pointers(std::move(shape)), tensor.written});
  }
  return pointers(std::move(infos));
}

const exportkit_dimension* const* Description::dimensions(const std::vector<DimensionRange>& described) {
  std::vector<exportkit_dimension> infos;
  for (const DimensionRange& dimension : described) {
    infos.push_back({dimension.name.c_str(), dimension.min, dimension.max});
  }
  return pointers(std::move(infos));
}

const exportkit_case_info* const* Description::cases(const Model& model) {
  std::vector<exportkit_case_info> infos;
  for (size_t i = 0; i < model.case_count(); ++i) {
    std::vector<exportkit_call_info> calls;
    for (const auto& [name, given] : model.case_calls(i)) {
      const MethodInfo& method = model.method(name);
      std::vector<int64_t> sizes;
      for (const DimensionRange& dimension : method.dimensions) {
        const auto found = given.find(dimension.name);
        sizes.push_back(found == given.end() ? -1 : found->second);
      }
      calls.push_back({static_cast<size_t>(&method - model.methods().data()), keep(std::move(sizes)).data()});
    }
    const int64_t* const first = calls.empty() ? nullptr : calls.front().dimensions;
    const size_t count = calls.size();
    infos.push_back({first, count, pointers(std::move(calls))});
  }
  return pointers(std::move(infos));
}

Description::Description(const Model& model) : device_(model.device().str()) {
  std::vector<exportkit_method_info> methods;
  for (const MethodInfo& info : model.methods()) {
    methods.push_back({info.name.c_str(), info.stateful, info.inputs.size(), tensors(info.inputs), info.outputs.size(),
                       tensors(info.outputs), info.dimensions.size(), dimensions(info.dimensions), info.state.size(),
                       info.state.data(), info.state_written.data(),
                       info.row_dimension ? static_cast<int64_t>(*info.row_dimension) : -1, info.row_reason.c_str()});
  }
  description_.name = model.name().c_str(), description_.version = model.version().c_str();
  description_.target = model.target().c_str(), description_.device = device_.c_str();
  description_.dl_device = dl_device(model.device());
  if (const std::optional<size_t> method = model.default_index()) {
    const exportkit_method_info& usual = methods[*method];
    description_.input_count = usual.input_count, description_.inputs = usual.inputs;
    description_.output_count = usual.output_count, description_.outputs = usual.outputs;
    description_.dimension_count = usual.dimension_count, description_.dimensions = usual.dimensions;
  }
  description_.case_count = model.case_count(), description_.cases = cases(model);
  description_.method_count = methods.size(), description_.methods = pointers(std::move(methods));
  description_.state_count = model.state().size(), description_.state = tensors(model.state());
  description_.state_dimension_count = model.state_dimensions().size();
  description_.state_dimensions = dimensions(model.state_dimensions());
  description_.bytes = model.bytes();
}

}  // namespace exportkit
