#include "runtime/session.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

namespace exportkit {
namespace {

// Makes the process's libstdc++ visible to all libraries. torch's loader crashes in std::regex where a model's library
// brings parts of its own libstdc++ along (linked statically by the compiler it was built with), unless the real one is
// found first.
void promote_libstdcxx() {
  static void* const promoted = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_GLOBAL);
  (void)promoted;  // none: then torch itself was built with another one
}

}  // namespace

Session::Session(const std::filesystem::path& library, c10::Device device, int64_t runners) : device_(device) {
  promote_libstdcxx();
  // The parts of torch that can run a device's code register themselves: one build of this library serves torch with
  // and without CUDA.
  const auto& known = torch::inductor::getAOTIModelRunnerRegistry();
  const std::string kind = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  const auto create = known.find(kind);
  TORCH_CHECK(create != known.end(), "this build of torch cannot run code for ", kind);
  const std::string kernels = device.is_cpu() ? "" : library.parent_path().string();
  runner_ =
      create->second(library.string(), static_cast<size_t>(runners), device.str(), kernels, /*single_threaded=*/false);
}

Session::~Session() = default;

std::vector<at::Tensor> Session::run(const std::vector<at::Tensor>& inputs) const {
  // The compiled code keeps no graph. Below autograd, its operators' own autograd kernels, which may be Python's and
  // would wait for the GIL, are not asked.
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // torch takes the current device's stream for the current stream, whichever device the model is on.
  const c10::DeviceGuard guard(device_);
  return runner_->run(inputs);
}

}  // namespace exportkit
