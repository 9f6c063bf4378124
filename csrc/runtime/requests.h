// Batches on their way to a device and back: the tensors of several requests become the model's inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace exportkit {

// Joins the inputs of several requests along axis 0, and puts them on a device. `tensors` has all inputs of the first
// request, then all of the second; each is contiguous and on the CPU. A GPU gets them through pinned memory, on the
// current stream; the copies may still run when this returns. Throws c10::Error if the tensors do not fit together.
std::vector<at::Tensor> join(const std::vector<at::Tensor>& tensors, int64_t requests, c10::Device device);

// Copies tensors to the CPU, and waits for the copies. The results are contiguous; a GPU writes to pinned memory.
std::vector<at::Tensor> fetch(const std::vector<at::Tensor>& tensors);

}  // namespace exportkit
