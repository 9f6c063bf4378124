// Helpers to launch CUDA kernels: the tensor's device, torch's current stream, the launch check.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "common/checks.h"

namespace arr_coc {

constexpr int kWarpSize = 32;

// Makes a tensor's device current for the scope.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}
  cudaStream_t stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// The blocks for `work` items, `per_block` each, with a cap for grid-stride loops (a grid's x is at most 2^31 - 1).
inline unsigned grid_size(int64_t work, int64_t per_block, int64_t cap = 1 << 20) {
  return static_cast<unsigned>(std::max<int64_t>(1, std::min(cap, (work + per_block - 1) / per_block)));
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

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
