// What both CUDA kernels share.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "common.h"

namespace paged_cache {

// Makes a tensor's device current for a scope. Kernels are launched on torch's current stream of the device.
class Cuda {
 public:
  explicit Cuda(const Tensor& x) : index_(x.get_device_index()), guard_(index_) {}

  cudaStream_t stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// The blocks of a grid-stride loop.
inline unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>(std::clamp<int64_t>((work + per_block - 1) / per_block, 1, 1 << 22));
}

// Whether rows that start at these steps (in elements of `bytes`) from `data` can be read 16 bytes at a time.
inline bool has_whole_vectors(const void* data, int64_t bytes, std::initializer_list<int64_t> steps) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         std::all_of(steps.begin(), steps.end(), [=](int64_t step) { return step * bytes % 16 == 0; });
}

}  // namespace paged_cache
