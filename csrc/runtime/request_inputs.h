// The inputs of requests, whose pieces become the inputs of one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
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

// A copy of its own costs a launch each, and the engine that does it rests after a moment without work.
class DeviceCopies {
 public:
  explicit DeviceCopies(c10::Device device) : device_(device) {}

  // Bytes on the device.
  void add(void* to, const void* from, uint64_t bytes) { copies_.push_back({to, from, bytes}); }
  // Begins them on the current stream.
  void begin();

 private:
  struct Copy {
    void* to;
    const void* from;
    uint64_t bytes;
  };

  const c10::Device device_;
  std::vector<Copy> copies_;
};

}  // namespace exportkit
