// DLPack's tensors as torch's, and the reverse, without a copy.
//
// torch's own conversion ignores byte_offset, and lets tensors point anywhere that their strides say.
#pragma once

#include <ATen/core/Tensor.h>
#include <dlpack/dlpack.h>

#include <memory>
#include <string>

namespace exportkit {

// The type of elements of this dtype.
DLDataType dl_dtype(at::ScalarType dtype);

DLDevice dl_device(c10::Device device);

// A view of the caller's memory, on the CPU or on `device`. InputError, which calls the tensor `name`.
at::Tensor borrow(const DLTensor* given, const std::string& name, c10::Device device);

struct FreeManaged {
  void operator()(DLManagedTensorVersioned* tensor) const noexcept { tensor->deleter(tensor); }
};
using ManagedTensor = std::unique_ptr<DLManagedTensorVersioned, FreeManaged>;

// A tensor for a caller, who frees it.
ManagedTensor lend(const at::Tensor& tensor);

}  // namespace exportkit
