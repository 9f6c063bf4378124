#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>

#include "exportkit/runtime.h"
#include "package/errors.h"
#include "package/text.h"
#include "runtime/cases.h"
#include "runtime/host.h"
#include "runtime/inputs.h"
#include "runtime/opened_package.h"
#include "runtime/weights.h"

namespace exportkit {
namespace {

SizeRange range_of(const Call& call, const Extent& extent) {
  if (const auto* fixed = std::get_if<int64_t>(&extent)) return {*fixed, *fixed, 1, std::to_string(*fixed)};
  const auto& size = std::get<Size>(extent);
  for (const Dimension& dimension : call.dimensions) {
    if (dimension.name != size.dimension) continue;
    return {size_at(size, dimension.min), size_at(size, dimension.max), size.scale, expression(size)};
  }
  return {0, INT64_MAX, 1, "?"};
}

std::vector<TensorInfo> describe_inputs(const Call& call) {
  std::vector<TensorInfo> described;
  for (const TensorInput& input : call.inputs) {
    TensorInfo& info = described.emplace_back(TensorInfo{input.name, input.dtype, {}});
    for (const Extent& extent : input.shape) info.shape.push_back(range_of(call, extent));
  }
  return described;
}

std::vector<TensorInfo> describe_outputs(const Call& call) {
  std::vector<TensorInfo> described;
  for (const TensorOutput& output : call.outputs) {
    TensorInfo& info = described.emplace_back(TensorInfo{output.name, output.dtype, {}});
    for (const auto& extent : output.shape) {
      info.shape.push_back(extent ? range_of(call, *extent) : SizeRange{0, INT64_MAX, 1, "?"});
    }
  }
  return described;
}

// Inputs with the given sizes, and any values. UsageError if a dimension is not given, unknown, or out of its range.
std::vector<at::Tensor> inputs_of(const Call& call, const std::map<std::string, int64_t>& sizes, at::Device device) {
  for (const auto& [name, size] : sizes) {
    const auto is_it = [&name = name](const Dimension& dimension) { return dimension.name == name; };
    if (std::any_of(call.dimensions.begin(), call.dimensions.end(), is_it)) continue;
    throw Error(errors::kUsage, "the package has no dimension " + name);
  }
  for (const Dimension& dimension : call.dimensions) {
    const auto given = sizes.find(dimension.name);
    if (given != sizes.end() && dimension.min <= given->second && given->second <= dimension.max) continue;
    throw Error(errors::kUsage, dimension.name + " must be from " + std::to_string(dimension.min) + " to " +
                                    std::to_string(dimension.max) + ", got " +
                                    (given == sizes.end() ? "nothing" : std::to_string(given->second)));
  }
  std::vector<at::Tensor> inputs;
  for (const TensorInput& input : call.inputs) {
    std::vector<int64_t> shape;
    for (const Extent& extent : input.shape) {
      const auto* size = std::get_if<Size>(&extent);
      shape.push_back(size == nullptr ? std::get<int64_t>(extent) : size_at(*size, sizes.at(size->dimension)));
    }
    inputs.push_back(at::empty(shape, at::TensorOptions(dtype_of(input.dtype)).device(device)));
  }
  return inputs;
}

// The process's TF32 switches as they were when a CUDA model's cases were recorded, while this object lives.
class RecordedPrecision {
 public:
  explicit RecordedPrecision(const Model& model) {
    if (!model.device().is_cuda()) return;
    lock_ = std::unique_lock(one_at_a_time());
    before_ = {context().allowTF32CuBLAS(), context().allowTF32CuDNN()};
    allow(model.tf32(), model.tf32());
  }
  ~RecordedPrecision() {
    if (lock_) allow(before_.first, before_.second);
  }
  RecordedPrecision(const RecordedPrecision&) = delete;
  RecordedPrecision& operator=(const RecordedPrecision&) = delete;

 private:
  static std::mutex& one_at_a_time() {
    static std::mutex mutex;
    return mutex;
  }
  static at::Context& context() { return at::globalContext(); }
  static void allow(bool products, bool convolutions) {
    context().setAllowTF32CuBLAS(products);
    context().setAllowTF32CuDNN(convolutions);
  }

  std::unique_lock<std::mutex> lock_;
  std::pair<bool, bool> before_;
};

}  // namespace

// Members are in construction order: the sessions are destroyed before the files that they map.
struct Model::Impl {
  OpenedPackage package;
  InputPlan plan;
  CacheEntry files;
  MappedWeights weights;
  CurrentCode session;
  std::vector<TensorInfo> inputs, outputs;
  std::vector<DimensionRange> dimensions;

  Impl(const std::string& path, const OpenOptions& options)
      : package(path, options),
        plan(manifest().call, package.device()),
        files(with_operators(package).unpack_target()),
        weights(package.reader()),
        session(package.load_target(files, weights.tensors())),
        inputs(describe_inputs(manifest().call)),
        outputs(describe_outputs(manifest().call)) {
    for (const Dimension& dimension : manifest().call.dimensions) {
      dimensions.push_back({dimension.name, dimension.min, dimension.max});
    }
  }

  const Manifest& manifest() const { return package.reader().manifest(); }

  void need_graphs() const {
    if (package.cuda_graphs()) return;
    throw Error(errors::kUsage, manifest().name + " was opened without CUDA graphs",
                "Set OpenOptions::cuda_graphs when it is opened.");
  }

 private:
  static const OpenedPackage& with_operators(const OpenedPackage& package) {
    package.load_operators();
    return package;
  }
};

namespace {

// Makes the CUDA graphs of the session that `session` takes the place of: ModelRunError.
void capture_as(const Code& session, const Code& old) {
  try {
    session.capture_as(old);
  } catch (const std::exception& error) {
    throw Error(errors::kModelRun, "the CUDA graphs cannot be made with the new weights: " + first_line(error.what()),
                "The old weights stay. Free some GPU memory and swap again: both need memory meanwhile.");
  }
}

}  // namespace

Model::Model(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Model Model::open(const std::string& path, const OpenOptions& options) {
  return Model(std::make_shared<Impl>(path, options));
}

void Model::swap_weights(const std::string& path) {
  const Manifest& manifest = impl_->manifest();
  const auto is_state = [](const Weight& weight) { return weight.state; };
  if (std::none_of(manifest.weights.begin(), manifest.weights.end(), is_state)) {
    throw Error(errors::kWeights, manifest.name + " has no weights outside its compiled code",
                "To swap weights, export the model without --embed-weights.");
  }
  impl_->session.replace([&] {
    const Weights weights = replaced_weights(manifest, impl_->package.target(), impl_->weights.tensors(), path);
    auto session = impl_->package.load_target(impl_->files, weights);
    if (impl_->package.cuda_graphs()) capture_as(*session, *impl_->session.get());
    return session;
  });
}

std::vector<at::Tensor> Model::run(const std::vector<at::Tensor>& inputs) const {
  const std::vector<at::Tensor> prepared = impl_->plan.prepare(inputs);
  try {
    return impl_->session.get()->run(prepared);
  } catch (const std::exception& error) {
    std::string given;
    for (const at::Tensor& tensor : prepared) given += (given.empty() ? "" : ", ") + describe(tensor);
    throw Error(errors::kModelRun, "the compiled model failed on (" + given + "): " + first_line(error.what()),
                "The operator's own message may be on stderr: torch's C interface drops it.");
  }
}

std::vector<at::Tensor> Model::capture(const std::map<std::string, int64_t>& sizes) const {
  impl_->need_graphs();
  const std::vector<at::Tensor> inputs = inputs_of(impl_->manifest().call, sizes, device());
  try {
    return impl_->session.get()->capture(inputs);
  } catch (const std::exception& error) {
    throw Error(errors::kModelRun, "these sizes cannot be a CUDA graph: " + first_line(error.what()),
                "Calls with these sizes run without one.");
  }
}

std::string Model::cuda_graphs() const {
  impl_->need_graphs();
  return impl_->session.get()->graph_report();
}

const std::string& Model::name() const { return impl_->manifest().name; }
const std::string& Model::version() const { return impl_->manifest().version; }
const std::string& Model::target() const { return impl_->package.target().name; }
at::Device Model::device() const { return impl_->package.device(); }
const std::vector<TensorInfo>& Model::inputs() const { return impl_->inputs; }
const std::vector<TensorInfo>& Model::outputs() const { return impl_->outputs; }
bool Model::tf32() const { return impl_->manifest().provenance.tf32; }
const std::vector<DimensionRange>& Model::dimensions() const { return impl_->dimensions; }
size_t Model::case_count() const { return impl_->manifest().cases.size(); }

RecordedCase Model::recorded_case(size_t index) const { return read_case(impl_->package.reader(), index, device()); }

CaseReport Model::replay(size_t index) const {
  const RecordedCase recorded = recorded_case(index);
  const RecordedPrecision as_recorded(*this);
  CaseReport report = compare(impl_->manifest(), recorded, run(recorded.inputs));
  report.sizes = recorded.sizes;
  return report;
}

std::map<std::string, int64_t> Model::case_sizes(size_t index) const {
  const Case& recorded = impl_->manifest().cases.at(index);
  return {recorded.sizes.begin(), recorded.sizes.end()};
}

std::string torch_version() { return running_torch(); }

}  // namespace exportkit
