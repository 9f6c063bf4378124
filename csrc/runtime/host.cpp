#include "runtime/host.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "package/cpu_levels.h"
#include "runtime/cuda_driver.h"

namespace exportkit {
std::string running_torch() {
  const uint64_t version = aoti_torch_abi_version();  // a byte each, from the top
  return std::to_string(version >> 56) + "." + std::to_string(version >> 48 & 0xff) + "." +
         std::to_string(version >> 40 & 0xff);
}

Host this_host(bool with_cuda) {
  Host host{host_platform(), host_cpu_isa(), running_torch(), std::nullopt, {}, 0, std::nullopt};
  if (!with_cuda || !torch::inductor::getAOTIModelRunnerRegistry().contains("cuda")) return host;
  const long version = at::detail::getCUDAHooks().versionCUDART();  // 13000 is 13.0
  host.cuda = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  host.driver = driver_cuda();  // with one that is too old, torch sees no device
  const c10::impl::DeviceGuardImplInterface* cuda = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  for (int index = 0; index < cuda->deviceCount(); ++index) host.capabilities.push_back(cuda_capability(index));
  if (!host.capabilities.empty()) host.current_cuda = cuda->getDevice().index();
  return host;
}

}  // namespace exportkit
