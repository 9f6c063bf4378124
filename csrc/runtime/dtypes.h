// The dtypes that packages have, by the manifest's names.
#pragma once

#include <c10/core/ScalarType.h>
#include <dlpack/dlpack.h>

namespace exportkit {

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

}  // namespace exportkit
