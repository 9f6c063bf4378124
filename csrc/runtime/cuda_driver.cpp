#include "runtime/cuda_driver.h"

#include <dlfcn.h>

namespace exportkit {
namespace {

using Context = void*;

struct Driver {
  DriverFunction<int(int*, int)> get_device{"cuDeviceGet"};
  DriverFunction<int(int*, int, int)> get_attribute{"cuDeviceGetAttribute"};
  DriverFunction<int(Context*)> get_current{"cuCtxGetCurrent"};
  DriverFunction<int(Context)> set_current{"cuCtxSetCurrent"};
  DriverFunction<int(Context*, int)> retain_primary{"cuDevicePrimaryCtxRetain"};
  DriverFunction<int(int)> release_primary{"cuDevicePrimaryCtxRelease_v2"};

  Driver() { TORCH_CHECK(DriverFunction<int(unsigned)>("cuInit")(0) == 0, "the CUDA driver cannot be initialised"); }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

void* driver_library() {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library;
}

int handle_of(int device) {
  int handle = 0;
  TORCH_CHECK(driver().get_device(&handle, device) == 0, "the CUDA driver does not know device ", device);
  return handle;
}

int attribute(int handle, int which) {
  int value = 0;
  TORCH_CHECK(driver().get_attribute(&value, which, handle) == 0,
              "the CUDA driver does not report the compute capability of device ", handle);
  return value;
}

}  // namespace

std::optional<std::string> driver_cuda() {
  if (driver_library() == nullptr) return std::nullopt;
  const DriverFunction<int(int*)> get_version("cuDriverGetVersion", /*needed=*/false);
  int version = 0;  // 13000 is 13.0
  if (get_version == nullptr || get_version(&version) != 0) return std::nullopt;
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void* driver_function(const char* name) {
  void* const library = driver_library();
  TORCH_CHECK(library != nullptr, "torch sees a CUDA device, but libcuda.so.1 cannot be loaded");
  return dlsym(library, name);
}

std::pair<int, int> cuda_capability(int device) {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}
  const int handle = handle_of(device);
  return {attribute(handle, kMajor), attribute(handle, kMinor)};
}

void ensure_cuda_context(int device) {
  Context context = nullptr;
  if (driver().get_current(&context) == 0 && context != nullptr) return;
  // CUDA's runtime keeps the primary context for torch, so this reference need not be kept.
  const int handle = handle_of(device);
  TORCH_CHECK(driver().retain_primary(&context, handle) == 0, "CUDA device ", device, " has no context");
  const bool current = driver().set_current(context) == 0;
  driver().release_primary(handle);
  TORCH_CHECK(current, "the context of CUDA device ", device, " cannot be made current");
}

}  // namespace exportkit
