// DLPack's tensors as torch's, and the reverse, without a copy.
//
// torch's own conversion ignores byte_offset, and lets tensors point anywhere that their strides say.
#pragma once

#include <ATen/core/Tensor.h>
#include <dlpack/dlpack.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace exportkit {

// The type of elements of this dtype.
DLDataType dl_dtype(at::ScalarType dtype);

DLDevice dl_device(c10::Device device);

// The dtype that DLPack calls so: InputError, which calls the tensor `name`.
at::ScalarType dtype_of(const DLDataType& given, const std::string& name);
// The CPU or `device`, whichever it is: InputError as above.
c10::Device device_of(const DLDevice& given, const std::string& name, c10::Device device);

// The sizes of a row-major tensor, and its bytes: InputError as above.
std::pair<std::vector<int64_t>, uint64_t> row_major(const int64_t* shape, int32_t ndim, at::ScalarType dtype,
                                                    const std::string& name);

// A view of the caller's memory, on the CPU or on `device`. InputError, which calls the tensor `name`.
at::Tensor borrow(const DLTensor* given, const std::string& name, c10::Device device);

struct FreeManaged {
  void operator()(DLManagedTensorVersioned* tensor) const noexcept { tensor->deleter(tensor); }
};
using ManagedTensor = std::unique_ptr<DLManagedTensorVersioned, FreeManaged>;

// A tensor for a caller, who frees it.
ManagedTensor lend(const at::Tensor& tensor);

}  // namespace exportkit
