// Operators in C++ that lack something the exporter needs, or have it wrong.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

static Tensor same(const Tensor& x) { return torch::stable::clone(x); }

STABLE_TORCH_LIBRARY(exportkit_probe, m) {
  m.def("without_fake(Tensor x) -> Tensor");
  m.def("wrong_shape(Tensor x) -> Tensor");
  m.def("wrong_dtype(Tensor x) -> Tensor");
  m.def("wrong_strides(Tensor x) -> Tensor");
  m.def("wrong_signature(Tensor x) -> Tensor");
  m.def("without_kernel(Tensor x) -> Tensor");
  m.def("python_kernel(Tensor x) -> Tensor");
  m.def("good(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exportkit_probe, CPU, m) {
  m.impl("without_fake", TORCH_BOX(&same));
  m.impl("wrong_shape", TORCH_BOX(&same));
  m.impl("wrong_dtype", TORCH_BOX(&same));
  m.impl("wrong_strides", TORCH_BOX(&same));
  m.impl("wrong_signature", TORCH_BOX(&same));
  m.impl("good", TORCH_BOX(&same));
}
