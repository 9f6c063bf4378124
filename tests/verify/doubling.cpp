// doubling::twice(x) = FACTOR * x. A build with another factor than 2 is wrong.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#ifndef FACTOR
#define FACTOR 2.0f
#endif

using torch::stable::Tensor;

Tensor twice(const Tensor& given) {
  STD_TORCH_CHECK(given.scalar_type() == torch::headeronly::ScalarType::Float, "doubling takes float32");
  const Tensor x = torch::stable::contiguous(given);  // verify gives other layouts, too
  Tensor y = torch::stable::empty_like(x);
  const float* in = static_cast<const float*>(x.const_data_ptr());
  float* out = static_cast<float*>(y.mutable_data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = FACTOR * in[i];
  return y;
}

STABLE_TORCH_LIBRARY(doubling, m) { m.def("twice(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(doubling, CPU, m) { m.impl("twice", TORCH_BOX(&twice)); }
