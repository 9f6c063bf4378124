// DLPack's tensors as torch's, and the reverse, without a copy.
//
// torch's own conversion ignores byte_offset, and lets tensors point anywhere that their strides say.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <dlpack/dlpack.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace exportkit {

// A dtype that packages have, by the manifest's name.
struct Dtype {
  const char* name;
  at::ScalarType type;
  DLDataTypeCode dlpack;
};

inline constexpr Dtype kDtypes[] = {
    {"bool", at::ScalarType::Bool, kDLBool},
    {"uint8", at::ScalarType::Byte, kDLUInt},
    {"uint16", at::ScalarType::UInt16, kDLUInt},
    {"uint32", at::ScalarType::UInt32, kDLUInt},
    {"uint64", at::ScalarType::UInt64, kDLUInt},
    {"int8", at::ScalarType::Char, kDLInt},
    {"int16", at::ScalarType::Short, kDLInt},
    {"int32", at::ScalarType::Int, kDLInt},
    {"int64", at::ScalarType::Long, kDLInt},
    {"float16", at::ScalarType::Half, kDLFloat},
    {"bfloat16", at::ScalarType::BFloat16, kDLBfloat},
    {"float32", at::ScalarType::Float, kDLFloat},
    {"float64", at::ScalarType::Double, kDLFloat},
    {"complex32", at::ScalarType::ComplexHalf, kDLComplex},
    {"complex64", at::ScalarType::ComplexFloat, kDLComplex},
    {"complex128", at::ScalarType::ComplexDouble, kDLComplex},
    {"float8_e4m3fn", at::ScalarType::Float8_e4m3fn, kDLFloat8_e4m3fn},
    {"float8_e5m2", at::ScalarType::Float8_e5m2, kDLFloat8_e5m2},
    {"float8_e4m3fnuz", at::ScalarType::Float8_e4m3fnuz, kDLFloat8_e4m3fnuz},
    {"float8_e5m2fnuz", at::ScalarType::Float8_e5m2fnuz, kDLFloat8_e5m2fnuz},
};

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
