// Batches on their way to a device and back: the tensors of several requests become the model's inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace exportkit {

// Joins the inputs of `requests` requests along axis 0, on `device`. `tensors` are on the CPU and contiguous: all
// inputs of the first request, then those of the second. The copies to a GPU go through pinned memory on the current
// stream, and may still run. c10::Error if the requests' tensors do not fit together.
std::vector<at::Tensor> join(const std::vector<at::Tensor>& tensors, int64_t requests, c10::Device device);

// Copies tensors to the CPU, contiguous, and waits for the current stream. Those of a GPU come into pinned memory.
std::vector<at::Tensor> fetch(const std::vector<at::Tensor>& tensors);

}  // namespace exportkit
