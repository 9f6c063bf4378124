#include "runtime/host.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace exportkit {
namespace {

// By the CUDA driver, so that one build of this library serves torch with and without CUDA.
std::pair<int, int> capability(int index) {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(driver != nullptr, "torch sees a CUDA device, and there is no libcuda.so.1");
  const auto initialise = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  const auto ask = reinterpret_cast<int (*)(int*, int, int)>(dlsym(driver, "cuDeviceGetAttribute"));
  int device = 0, major = 0, minor = 0;
  const bool known = initialise && get && ask && initialise(0) == 0 && get(&device, index) == 0 &&
                     ask(&major, kMajor, device) == 0 && ask(&minor, kMinor, device) == 0;
  TORCH_CHECK(known, "the CUDA driver does not say what device ", index, " is");
  return {major, minor};
}

}  // namespace

std::string running_torch() {
  const uint64_t version = aoti_torch_abi_version();  // a byte each, from the top
  return std::to_string(version >> 56) + "." + std::to_string(version >> 48 & 0xff) + "." +
         std::to_string(version >> 40 & 0xff);
}

Host this_host(bool with_cuda) {
  Host host{host_platform(), host_cpu_isa(), running_torch(), std::nullopt, {}, 0};
  if (!with_cuda || !torch::inductor::getAOTIModelRunnerRegistry().contains("cuda")) return host;
  const long version = at::detail::getCUDAHooks().versionCUDART();  // 13000 is 13.0
  host.cuda = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  const c10::impl::DeviceGuardImplInterface* cuda = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  for (int index = 0; index < cuda->deviceCount(); ++index) host.capabilities.push_back(capability(index));
  if (!host.capabilities.empty()) host.current_cuda = cuda->getDevice().index();
  return host;
}

}  // namespace exportkit
