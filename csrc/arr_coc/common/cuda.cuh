// Helpers to launch CUDA kernels: the tensor's device, torch's current stream, the launch check.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

constexpr int kWarpSize = 32;

// The blocks of a kernel, the threads of each, and the bytes of shared memory that it does not declare itself.
struct Grid {
  dim3 blocks, threads;
  size_t bytes = 0;
};

// The device of an adapter: `run(const Cuda&, ...)` launches the kernels. Makes a tensor's device current for the
// scope.
class Cuda {
 public:
  explicit Cuda(const Tensor& tensor) : device_(tensor.device()), guard_(device_.index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_.index(), &stream_));
  }

  const torch::stable::Device& device() const { return device_; }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

  // Launches a kernel on torch's current stream, and checks that it was launched.
  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), const Grid& grid, const Arguments&... arguments) const {
    kernel<<<grid.blocks, grid.threads, grid.bytes, stream()>>>(arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  torch::stable::Device device_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

// Uninitialised memory of torch's allocator for `size` elements of A. Kernels that were launched on the current stream
// may use it after its end.
template <class A>
class Scratch {
 public:
  Scratch(const Cuda& device, int64_t size)
      : bytes_(allocate(device.device(), {size * int64_t(sizeof(A))}, ScalarType::Byte)) {}

  A* data() { return data_of<A>(bytes_); }

 private:
  Tensor bytes_;
};

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <class A>
constexpr A kLeast = std::numeric_limits<A>::lowest();

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// The blocks for `work` items, `per_block` each, with a cap for grid-stride loops (a grid's x is at most 2^31 - 1).
inline unsigned grid_size(int64_t work, int64_t per_block, int64_t cap = 1 << 20) {
  return static_cast<unsigned>(std::max<int64_t>(1, std::min(cap, (work + per_block - 1) / per_block)));
}

template <class... T>
bool start_on_16_bytes(const T*... data) {
  return ((reinterpret_cast<uintptr_t>(data) % 16 == 0) && ...);
}

// Neighbours that are read and written at once, 16 bytes at most.
template <class T, int n>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Pack {
  T values[n];
};

// Elements that start on 16 bytes: those given, or a copy of them.
template <class T>
class AlignedData {
 public:
  AlignedData(const Cuda& device, const T* data, int64_t size) : data_(data) {
    if (start_on_16_bytes(data)) return;
    data_ = copy_.emplace(device, size).data();
    STD_CUDA_CHECK(cudaMemcpyAsync(copy_->data(), data, size * sizeof(T), cudaMemcpyDeviceToDevice, device.stream()));
  }

  const T* data() const { return data_; }

 private:
  const T* data_;
  std::optional<Scratch<T>> copy_;
};

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// 2^x. The hardware's error is 2 units in the last place, less than the effect of rounding x.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }

// Like torch.maximum: NaN wins.
template <class T>
__device__ __forceinline__ T nan_max(T a, T b) {
  return (a > b || a != a) ? a : b;
}

template <class T>
__device__ __forceinline__ T warp_max(T value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = nan_max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// The sum over the block in a fixed order, for every thread. `shared` holds one value per warp and may be reused after
// the call.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* shared) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
  value = warp_sum(value);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = warp_sum(lane < warps ? shared[lane] : T(0));
  __syncthreads();
  return value;
}

}  // namespace arr_coc
