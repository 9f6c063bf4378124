#include <torch/headeronly/version.h>

#include <optional>

#include "exportkit/runtime.h"
#include "runtime/cache.h"
#include "runtime/cases.h"
#include "runtime/host.h"
#include "runtime/inputs.h"
#include "runtime/operators.h"
#include "runtime/package/errors.h"
#include "runtime/package/trust.h"
#include "runtime/session.h"
#include "runtime/weights.h"

namespace exportkit {
namespace {

std::string first_line(const char* text) { return std::string(text).substr(0, std::string(text).find('\n')); }

SizeRange range_of(const Call& call, const Extent& extent) {
  if (const auto* fixed = std::get_if<int64_t>(&extent)) return {*fixed, *fixed, 1, std::to_string(*fixed)};
  const auto& size = std::get<Size>(extent);
  for (const Dimension& dimension : call.dimensions) {
    if (dimension.name != size.dimension) continue;
    return {size.scale * dimension.min + size.offset, size.scale * dimension.max + size.offset, size.scale,
            expression(size)};
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

// torch's C++ API, which this uses, holds for one minor version only.
void check_torch() {
  const std::string built = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  if (running_torch().starts_with(built + ".")) return;
  throw Error(errors::kTorchVersion,
              "the C++ runtime was built with torch " + built + ", and runs with torch " + running_torch(),
              "Build it for the torch that is installed (make build).");
}

Choice choose(const Manifest& manifest, const OpenOptions& options) {
  bool with_cuda = false;
  for (const Target& target : manifest.targets) {
    with_cuda |= target.device == "cuda" && (!options.target || *options.target == target.name);
  }
  with_cuda &= parse_device(options.device).first != "cpu";
  return pick(manifest.targets, options.device, this_host(with_cuda), options.target);
}

c10::Device device_of(const Choice& choice) {
  return choice.device_index < 0 ? c10::Device(c10::kCPU)
                                 : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(choice.device_index));
}

// The target's library in the cache: the last by name, as torch takes it.
std::filesystem::path library_of(const PackageReader& reader, const Target& target, const CacheEntry& entry) {
  const std::string folder = "data/aotinductor/" + target.name + "/";
  std::string library;
  for (const Record& record : reader.manifest().records) {  // sorted
    if (record.name.starts_with(folder) && record.name.ends_with(".so")) library = record.name.substr(folder.size());
  }
  return entry.folder() / library;
}

Session load_target(const PackageReader& reader, const Choice& choice, const CacheEntry& entry,
                    const MappedWeights& weights, int64_t runners) {
  try {
    return Session(library_of(reader, *choice.target, entry), device_of(choice), runners, weights.constants());
  } catch (const std::exception& error) {
    throw Error(errors::kModelLoad,
                "torch " + running_torch() + " cannot load target " + choice.target->name + " of " +
                    reader.path().filename().string() + ": " + first_line(error.what()),
                "Where the cache is mounted noexec, set EXPORTKIT_CACHE to a directory that may hold code.");
  }
}

}  // namespace

// In the order in which they must come to be; the session goes before the files that it maps.
struct Model::Impl {
  PackageReader reader;
  Choice choice;
  InputPlan plan;
  CacheEntry entry;
  MappedWeights weights;
  Session session;
  std::vector<TensorInfo> inputs, outputs;

  Impl(const std::string& path, const OpenOptions& options)
      : reader(path),
        choice(checked(reader, options)),
        plan(reader.manifest().call, device_of(choice)),
        entry(unpack(reader, *choice.target)),
        weights(reader, *choice.target),
        session(load_target(reader, choice, entry, weights, options.runners)),
        inputs(describe_inputs(reader.manifest().call)),
        outputs(describe_outputs(reader.manifest().call)) {
    reader.check_unchanged();  // what was unpacked was read once more
  }

  // Everything that is known before anything of the package is executed, and then its operator libraries.
  static Choice checked(const PackageReader& reader, const OpenOptions& options) {
    check_torch();
    if (options.runners < 1) {
      throw Error(errors::kUsage, "runners must be a whole number from 1, got " + std::to_string(options.runners));
    }
    check_trust(reader, options.public_keys, options.signature);
    reader.verify();
    const Choice choice = choose(reader.manifest(), options);
    load_operators(reader, *choice.target, running_torch());
    return choice;
  }
};

Model::Model(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Model Model::open(const std::string& path, const OpenOptions& options) {
  return Model(std::make_shared<const Impl>(path, options));
}

std::vector<at::Tensor> Model::run(const std::vector<at::Tensor>& inputs) const {
  const std::vector<at::Tensor> prepared = impl_->plan.prepare(inputs);
  try {
    return impl_->session.run(prepared);
  } catch (const std::exception& error) {
    std::string given;
    for (const at::Tensor& tensor : prepared) given += (given.empty() ? "" : ", ") + describe(tensor);
    throw Error(errors::kModelRun, "the compiled model failed on (" + given + "): " + first_line(error.what()),
                "What an operator said of it is on stderr, where torch's C interface left it.");
  }
}

const std::string& Model::name() const { return impl_->reader.manifest().name; }
const std::string& Model::version() const { return impl_->reader.manifest().version; }
const std::string& Model::target() const { return impl_->choice.target->name; }
at::Device Model::device() const { return device_of(impl_->choice); }
const std::vector<TensorInfo>& Model::inputs() const { return impl_->inputs; }
const std::vector<TensorInfo>& Model::outputs() const { return impl_->outputs; }
size_t Model::case_count() const { return impl_->reader.manifest().cases.size(); }

RecordedCase Model::recorded_case(size_t index) const { return read_case(impl_->reader, index, device()); }

CaseReport Model::replay(size_t index) const {
  const RecordedCase recorded = recorded_case(index);
  CaseReport report = compare(impl_->reader.manifest().call.outputs, recorded.outputs, run(recorded.inputs));
  report.sizes = recorded.sizes;
  return report;
}

std::string torch_version() { return running_torch(); }

}  // namespace exportkit
