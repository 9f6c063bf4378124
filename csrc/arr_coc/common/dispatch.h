// Maps a tensor's dtype to a C++ type.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

// Marks functions that CPU and CUDA kernels both call. They are always inlined, so that on the CPU they are compiled
// for the same x86-64 level as the caller.
#define ARR_COC_FUNCTION C10_HOST_DEVICE inline __attribute__((always_inline))

namespace arr_coc {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The computing type: float for float16, bfloat16 and float32; double for float64.
template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <class T>
using accumulate_t = typename Accumulate<T>::type;

// The computing type's dtype.
inline ScalarType accumulate_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls f(T{}) with the C++ type of a floating dtype. The caller has checked the dtype (checks.h).
template <class F>
void dispatch_floating(ScalarType dtype, F&& f) {
  if (dtype == ScalarType::Float) return f(float{});
  if (dtype == ScalarType::Double) return f(double{});
  if (dtype == ScalarType::Half) return f(Half{});
  if (dtype == ScalarType::BFloat16) return f(BFloat16{});
  STD_TORCH_CHECK(false, "dispatch_floating: unchecked dtype");
}

}  // namespace arr_coc
