#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <iostream>

#include "package/errors.h"
#include "package/targets.h"
#include "package/text.h"
#include "package/trust_records.h"
#include "runtime/cuda_driver.h"
#include "runtime/impl.h"

namespace exportkit {
namespace {

constexpr int64_t kMostThreads = 4096;

// This library uses torch's C++ API, which is compatible within one minor version only.
void check_torch() {
  const std::string built = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  if (torch_version().starts_with(built + ".")) return;
  throw Error(errors::kTorchVersion,
              "the C++ runtime was built with torch " + built + " but runs with torch " + torch_version(),
              "Build it for the installed torch (make build).");
}

OpenOptions checked(OpenOptions options) {
  check_torch();
  if (options.runners < 1) {
    throw Error(errors::kUsage, "runners must be a positive integer, got " + std::to_string(options.runners));
  }
  if (options.threads < 0 || options.threads > kMostThreads) {
    throw Error(errors::kUsage, concat("threads must be from 0 to ", kMostThreads, ", got ", options.threads));
  }
  if (!options.warn) {
    options.warn = [](const std::string& warning) { std::cerr << "warning: " << warning << "\n"; };
  }
  return options;
}

// Why the driver cannot compile what a target has for its GPU; nothing if it can, or need not.
std::optional<std::string> late_rejection(const PackageReader& reader, const Choice& choice, const Host& host) {
  if (!host.driver || fit_of(choice, host) == "native") return std::nullopt;
  const Manifest& manifest = reader.manifest();
  for (const Method& method : manifest.methods) {
    const std::string folder = "data/aotinductor/" + code_folder(choice.target->name, method.name) + "/";
    for (const Record& record : manifest.records) {
      const std::string& name = record.name;
      if (!name.starts_with(folder) || (!name.ends_with(".so") && !name.ends_with(".cubin"))) continue;
      const auto ptx = newest_ptx(reader.read(name));
      if (ptx) {
        if (auto reason = ptx_rejection(*ptx, *host.driver)) return reason;
      }
    }
  }
  return std::nullopt;
}

// This machine. `with_cuda` includes the GPUs, which initialises CUDA.
Host this_host(bool with_cuda) {
  Host host{host_platform(), host_cpu_isa(), torch_version(), std::nullopt, {}, 0, std::nullopt};
  if (!with_cuda || !torch::inductor::getAOTIModelRunnerRegistry().contains("cuda")) return host;
  const long version = at::detail::getCUDAHooks().versionCUDART();  // 13000 is 13.0
  host.cuda = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  host.driver = driver_cuda();  // with one that is too old, torch sees no device
  const c10::impl::DeviceGuardImplInterface* cuda = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  for (int index = 0; index < cuda->deviceCount(); ++index) host.capabilities.push_back(cuda_capability(index));
  if (!host.capabilities.empty()) host.current_cuda = cuda->getDevice().index();
  return host;
}

Choice choose(const PackageReader& reader, const OpenOptions& options) {
  const Manifest& manifest = reader.manifest();
  const auto may_use_cuda = [&](const Target& target) {
    return target.device == "cuda" && (!options.target || *options.target == target.name);
  };
  const bool with_cuda = std::any_of(manifest.targets.begin(), manifest.targets.end(), may_use_cuda);
  const Host host = this_host(with_cuda && parse_device(options.device).first != "cpu");
  const auto asked = [&]() -> std::vector<Choice> {
    if (!options.target) return survey(manifest.targets, manifest.libraries, options.device, host).fitting;
    return {pick(manifest.targets, manifest.libraries, options.device, host, *options.target)};
  };
  std::string reasons;
  for (const Choice& choice : asked()) {
    const auto reason = late_rejection(reader, choice, host);
    if (!reason) return choice;
    reasons += "\n  " + choice.target->name + ": " + *reason;
  }
  throw Error(errors::kNoTarget, "no target of the package runs here (device " + options.device + "):" + reasons,
              "Install a newer driver, or export for this GPU (--cuda-arch).");
}

// Which arguments the code writes: the inputs of the call come first, then the state.
std::vector<int64_t> written_arguments(const Method& method) {
  std::vector<int64_t> written;
  for (size_t i = 0; i < method.call.inputs.size(); ++i) {
    if (method.call.inputs[i].written) written.push_back(static_cast<int64_t>(i));
  }
  for (size_t i = 0; i < method.state.size(); ++i) {
    if (method.state[i].written) written.push_back(static_cast<int64_t>(method.call.inputs.size() + i));
  }
  return written;
}

}  // namespace

std::string torch_version() {
  const uint64_t version = aoti_torch_abi_version();  // a byte each, from the top
  return concat(version >> 56, ".", version >> 48 & 0xff, ".", version >> 40 & 0xff);
}

OpenedPackage::OpenedPackage(const Opening& open, OpenOptions options)
    : options_(checked(std::move(options))),
      asked_{options_.public_keys, options_.signature, options_.signature_content},
      own_(std::in_place, open(), &asked_),
      reader_(*own_),
      choice_(verified_choice()) {}

OpenedPackage::OpenedPackage(const PackageReader& reader, const std::string& target, c10::Device device)
    : reader_(reader), choice_{nullptr, device.is_cpu() ? -1 : device.index()} {
  for (const Target& each : reader.manifest().targets) {
    if (each.name == target) choice_.target = &each;
  }
  TORCH_CHECK(choice_.target != nullptr, reader.name(), " has no target ", target);
}

Choice OpenedPackage::verified_choice() const {
  verify_once(reader_, options_.verify == Verify::kAlways);
  const Choice choice = choose(reader_, options_);
  if (options_.cuda_graphs == CudaGraphs::kNone) return choice;
  if (choice.device_index < 0) {
    throw Error(errors::kUsage,
                "CUDA graphs are for a model on CUDA; target " + choice.target->name + " is for the CPU",
                "Open it without graphs, or with the device cuda.");
  }
  if (const char* const reason = why_no_cuda_recorder()) {
    throw Error(errors::kHost, std::string("there are no CUDA graphs here: ") + reason,
                "Build the C++ runtime with a torch for CUDA, where CUDA's headers are (make build).");
  }
  return choice;
}

c10::Device OpenedPackage::device() const {
  if (choice_.device_index < 0) return c10::Device(c10::kCPU);
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(choice_.device_index)};
}

std::vector<CacheEntry> OpenedPackage::unpacked() const {
  const Unpacking how{options_.verify == Verify::kAlways, options_.warn};
  load_operators(reader_, target(), how);
  std::vector<CacheEntry> files;
  for (const Method& method : reader_.manifest().methods) {
    files.push_back(unpack_code(reader_, code_folder(target().name, method.name), how));
  }
  return files;
}

std::shared_ptr<const Code> OpenedPackage::load_code(const Method& method, const CacheEntry& files,
                                                     const Weights& weights) const {
  std::shared_ptr<const Code> code;
  try {
    const CodeOptions options{device(), options_.runners, options_.cuda_graphs, written_arguments(method),
                              options_.threads};
    code = std::make_shared<const Code>(files.library, options, constants_of(target(), method.name, weights));
  } catch (const std::exception& error) {
    throw Error(errors::kModelLoad,
                "torch " + torch_version() + " cannot load target " + target().name + " of " + reader_.name() + ": " +
                    first_line(error.what()),
                "stderr may say more. If the cache is mounted noexec, set EXPORTKIT_CACHE to a directory that allows "
                "executable code.");
  }
  reader_.check_unchanged();  // unpacking read the package again
  return code;
}

}  // namespace exportkit
