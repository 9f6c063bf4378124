// The inputs of requests, whose pieces become the inputs of one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <span>
#include <string>
#include <vector>

#include "exportkit/exportkit.h"

namespace exportkit {

struct RequestInput {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  uint64_t bytes;
  std::span<const exportkit_piece> pieces;
};

// An input whose pieces have the bytes of its shape, on the CPU or on `device`: InputError, UsageError.
RequestInput read_input(const exportkit_request_input& given, const std::string& name, c10::Device device);

// The inputs of several requests, one after the other along axis 0, on `device`. An input of a single request that lies
// there in one aligned piece is read where it is. Others lie in `kept`, or are copied to the GPU, which may still copy
// when this returns.
std::vector<at::Tensor> joined(const std::vector<const std::vector<RequestInput>*>& requests, c10::Device device,
                               std::vector<at::Tensor>& kept);

// A view of memory as bytes: InputError if it is not where it is said to be.
at::Tensor bytes_at(const void* data, uint64_t bytes, c10::Device device);

}  // namespace exportkit
