#include <ATen/Context.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "exportkit/runtime.h"
#include "package/errors.h"
#include "package/text.h"
#include "runtime/compare.h"
#include "runtime/impl.h"
#include "runtime/streams.h"
#include "runtime/weights.h"

namespace exportkit {
namespace {

std::vector<InputPlan> plans_of(const Manifest& manifest, c10::Device device) {
  std::vector<InputPlan> plans;
  for (const Method& method : manifest.methods) plans.emplace_back(method.call, device);
  return plans;
}

// Makes the CUDA graphs of the code that `code` takes the place of: ModelRunError.
void capture_as(const Code& code, const Code& old) {
  try {
    code.capture_as(old);
  } catch (const std::exception& error) {
    throw Error(errors::kModelRun, "the CUDA graphs cannot be made with the new weights: " + first_line(error.what()),
                "The old weights stay. Free some GPU memory and swap again: both need memory meanwhile.");
  }
}

Error refusal(const std::vector<MethodInfo>& methods, size_t method, std::string_view text) {
  const std::string what = methods.size() == 1 ? "the compiled model" : "the compiled method " + methods[method].name;
  return Error(errors::kRefusedValue,
               what + " refused a value, as eager does: " + std::string(text.substr(std::strlen(kRefusedValue))),
               methods[method].stateful
                   ? "Correct the input. If the method writes state, reset the session or load a state."
                   : "Correct the input. The next call runs as usual.");
}

// Sets the switches as they were when a CUDA model's cases were recorded, until the result ends.
auto as_recorded(c10::Device device, bool tf32) {
  static std::mutex one_at_a_time;
  at::Context& context = at::globalContext();
  const auto allow = [&context](bool products, bool convolutions) {
    context.setAllowTF32CuBLAS(products);
    context.setAllowTF32CuDNN(convolutions);
  };
  std::unique_lock<std::mutex> lock;
  if (device.is_cuda()) lock = std::unique_lock(one_at_a_time);
  const bool products = context.allowTF32CuBLAS(), convolutions = context.allowTF32CuDNN();
  if (lock) allow(tf32, tf32);
  return c10::make_scope_exit([lock = std::move(lock), allow, products, convolutions] {
    if (lock) allow(products, convolutions);
  });
}

}  // namespace

// All calls of a case agree on them.
Sizes session_sizes(const Model& model, const RecordedCase& recorded) {
  Sizes sizes;
  for (const DimensionRange& dimension : model.state_dimensions()) {
    for (const RecordedCall& call : recorded.calls) {
      const auto size = call.sizes.find(dimension.name);
      if (size != call.sizes.end() && model.method(call.method).stateful) sizes.emplace(*size);
    }
    sizes.try_emplace(dimension.name, dimension.min);  // of state that the case does not use
  }
  return sizes;
}

Model::Impl::Impl(const Opening& open, const OpenOptions& options)
    : package(open, options),
      plans(plans_of(manifest(), package.device())),
      files(package.unpacked()),
      weights(std::in_place, package.reader()),
      bytes(weight_bytes_of(manifest(), package.target())),
      code(load(weights->tensors)) {}

Model::Impl::Impl(const PackageReader& reader, const std::string& target, c10::Device device,
                  CurrentCode::Methods loaded)
    : package(reader, target, device), plans(plans_of(manifest(), device)), code(std::move(loaded)) {}

size_t Model::Impl::index_of(const std::string& name) const {
  const Method* const method = method_of(manifest(), name);
  if (method != nullptr) return static_cast<size_t>(method - manifest().methods.data());
  throw Error(errors::kUsage, manifest().name + " has no method " + shown(name), "It has " + names_of(methods) + ".");
}

std::optional<size_t> Model::default_index() const {
  if (exportkit::default_method(impl_->manifest()) == nullptr) return std::nullopt;
  return impl_->default_index();
}

size_t Model::Impl::default_index() const {
  const Method* const method = exportkit::default_method(manifest());
  if (method != nullptr) return static_cast<size_t>(method - manifest().methods.data());
  throw Error(errors::kUsage, manifest().name + " has several methods and none is forward: name one",
              "It has " + names_of(methods) + ".");
}

CurrentCode::Methods Model::Impl::load(const Weights& from) const {
  const Weights placed = on_device(package.target(), from, package.device());
  CurrentCode::Methods loaded;
  for (size_t i = 0; i < methods.size(); ++i) {
    loaded.push_back(package.load_code(manifest().methods[i], files[i], placed));
  }
  return loaded;
}

void Model::Impl::look(size_t method, const std::optional<at::Tensor>& refused) const {
  try {
    code.get(method)->look(refused);
  } catch (const c10::Error& error) {
    throw refusal(methods, method, error.what_without_backtrace());
  }
}

void Model::Impl::wait() const { wait_for_stream(package.device()); }

std::vector<at::Tensor> Model::Impl::run(size_t method, const std::vector<at::Tensor>& prepared,
                                         const StateInUse* in_use) const {
  try {
    if (in_use == nullptr) return code.get(method)->run(prepared);
    if (in_use->tensors.empty()) return code.get(method)->run(prepared, in_use->refused, in_use->last);
    std::vector<at::Tensor> arguments = prepared;
    arguments.insert(arguments.end(), in_use->tensors.begin(), in_use->tensors.end());
    return code.get(method)->run(arguments, in_use->refused, in_use->last);
  } catch (const std::exception& error) {
    const std::string said = first_line(error.what());
    if (said.starts_with(kRefusedValue)) throw refusal(methods, method, said);
    std::string given;
    for (const at::Tensor& tensor : prepared) given += (given.empty() ? "" : ", ") + describe(tensor);
    const std::string what = methods.size() == 1 ? "the compiled model" : "the compiled method " + methods[method].name;
    throw Error(errors::kModelRun, what + " failed on (" + given + "): " + said,
                "The operator's own message may be on stderr: torch's C interface drops it.");
  }
}

void Model::Impl::add_state(size_t method, const Sizes& sizes, std::vector<at::Tensor>& arguments) const {
  Sizes of_state;
  for (const DimensionRange& dimension : state_dimensions) {
    const auto size = sizes.find(dimension.name);
    of_state.emplace(dimension.name, size == sizes.end() ? dimension.min : size->second);
  }
  const std::vector<at::Tensor> state = initial.make(of_state);
  for (const StateUse& use : manifest().methods[method].state) {
    arguments.push_back(state.at(static_cast<size_t>(use.index)));
  }
}

void Model::Impl::need_graphs() const {
  if (package.cuda_graphs()) return;
  throw Error(errors::kUsage, manifest().name + " was opened without CUDA graphs",
              "Set OpenOptions::cuda_graphs when it is opened.");
}

Model::Model(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Model Model::open(const std::string& path, const OpenOptions& options) {
  return Model(std::make_shared<Impl>([&] { return OpenedFile::by_path(path); }, options));
}

Model Model::open(std::span<const std::byte> bytes, const OpenOptions& options) {
  const std::string_view content(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return Model(std::make_shared<Impl>([&] { return OpenedFile::of_bytes(content); }, options));
}

Model Model::open_descriptor(int descriptor, const OpenOptions& options) {
  const auto open = [&] { return OpenedFile::of_descriptor(descriptor, options.stream_limit); };
  return Model(std::make_shared<Impl>(open, options));
}

void Model::swap_weights(const std::string& path) {
  const Manifest& manifest = impl_->manifest();
  if (std::ranges::none_of(manifest.weights, &Weight::state)) {
    throw Error(errors::kWeights, manifest.name + " has no weights outside its compiled code",
                std::string(manifest.state.empty()
                                ? ""
                                : "Parameters that are state belong to sessions, which load_state replaces. ") +
                    "To swap weights, export the model without --embed-weights.");
  }
  impl_->code.replace([&] {
    auto loaded =
        impl_->load(replaced_weights(manifest, impl_->package.target(), impl_->weights->tensors, impl_->initial, path));
    for (size_t i = 0; impl_->package.cuda_graphs() && i < loaded.size(); ++i) {
      capture_as(*loaded[i], *impl_->code.get(i));
    }
    return loaded;
  });
}

void Model::synchronize() const {
  impl_->wait();
  for (size_t method = 0; method < impl_->methods.size(); ++method) impl_->look(method, std::nullopt);
}

std::vector<at::Tensor> Model::run(const std::vector<at::Tensor>& inputs) const {
  return run(default_method().name, inputs);
}

std::vector<at::Tensor> Model::run(const std::string& name, const std::vector<at::Tensor>& inputs) const {
  const size_t method = impl_->index_of(name);
  if (impl_->methods[method].stateful) {
    throw Error(errors::kUsage, name + " of " + this->name() + " has state, which belongs to a session",
                "Make a session of the model, and call its method.");
  }
  return impl_->run(method, impl_->plans[method].prepare(inputs), nullptr);
}

std::vector<at::Tensor> Model::capture(const std::map<std::string, int64_t>& sizes) const {
  return capture(default_method().name, sizes);
}

std::vector<at::Tensor> Model::capture(const std::string& name, const std::map<std::string, int64_t>& sizes) const {
  impl_->need_graphs();
  const size_t method = impl_->index_of(name);
  check_sizes(impl_->methods[method].dimensions, sizes, "the package");
  std::vector<at::Tensor> inputs = inputs_of(impl_->manifest().methods[method].call, sizes, device());
  const size_t own = inputs.size();
  if (impl_->methods[method].stateful) impl_->add_state(method, sizes, inputs);
  try {
    return impl_->code.get(method)->capture(inputs, own);
  } catch (const std::exception& error) {
    throw Error(errors::kModelRun, "these sizes cannot be a CUDA graph: " + first_line(error.what()),
                "Calls with these sizes run without one.");
  }
}

std::string Model::cuda_graphs() const { return cuda_graphs(default_method().name); }

std::string Model::cuda_graphs(const std::string& method) const {
  impl_->need_graphs();
  return impl_->code.get(impl_->index_of(method))->graph_report();
}

const std::string& Model::name() const { return impl_->manifest().name; }
const std::string& Model::version() const { return impl_->manifest().version; }
const std::string& Model::target() const { return impl_->package.target().name; }
at::Device Model::device() const { return impl_->package.device(); }
bool Model::tf32() const { return impl_->manifest().provenance.tf32; }
const std::vector<MethodInfo>& Model::methods() const { return impl_->methods; }
const MethodInfo& Model::method(const std::string& name) const { return impl_->methods[impl_->index_of(name)]; }
const MethodInfo& Model::default_method() const { return impl_->methods[impl_->default_index()]; }
const std::vector<TensorInfo>& Model::state() const { return impl_->state; }
const std::vector<DimensionRange>& Model::state_dimensions() const { return impl_->state_dimensions; }
uint64_t Model::bytes() const { return impl_->bytes; }
size_t Model::case_count() const { return impl_->manifest().cases.size(); }

std::vector<std::pair<std::string, std::map<std::string, int64_t>>> Model::case_calls(size_t index) const {
  std::vector<std::pair<std::string, std::map<std::string, int64_t>>> calls;
  for (const CaseCall& call : impl_->manifest().cases.at(index).calls) {
    calls.emplace_back(call.method, Sizes(call.sizes.begin(), call.sizes.end()));
  }
  return calls;
}

RecordedCase Model::recorded_case(size_t index) const { return read_case(impl_->package.reader(), index, device()); }

CaseReport Model::replay(size_t index) const {
  const RecordedCase recorded = recorded_case(index);
  const auto precision = as_recorded(device(), tf32());
  const Comparison comparison(impl_->manifest());
  std::optional<Session> session;
  const auto needs_session = [&](const RecordedCall& call) { return method(call.method).stateful; };
  if (std::any_of(recorded.calls.begin(), recorded.calls.end(), needs_session)) {
    session = this->session(session_sizes(*this, recorded));
  }
  CaseReport report;
  report.edge_case = recorded.edge_case;
  for (const RecordedCall& call : recorded.calls) {
    const auto outputs = session ? session->run(call.method, call.inputs) : run(call.method, call.inputs);
    session ? session->synchronize() : synchronize();
    report.calls.push_back(comparison.compare(call, outputs));
    if (!report.calls.back().problem.empty()) return report;
  }
  if (session) report.state = comparison.compare_state(recorded, session->state());
  return report;
}

}  // namespace exportkit
