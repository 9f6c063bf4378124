// Operators in C++ that lack something the exporter needs, or have it wrong.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

static Tensor same(const Tensor& x) { return torch::stable::clone(x); }
static void write(const Tensor x, Tensor out) { torch::stable::copy_(out, x); }

STABLE_TORCH_LIBRARY(exportkit_probe, m) {
  m.def("without_fake(Tensor x) -> Tensor");
  m.def("wrong_dtype(Tensor x) -> Tensor");
  m.def("wrong_strides(Tensor x) -> Tensor");
  m.def("wrong_batch(Tensor x) -> Tensor");
  m.def("python_kernel(Tensor x) -> Tensor");
  m.def("good(Tensor x) -> Tensor");
  m.def("write(Tensor x, Tensor(a!) out) -> ()");
  m.def("twice_(Tensor(a!) x) -> Tensor(a!)");
  m.def("view(Tensor(a) x) -> Tensor(a)");
  m.def("split_(Tensor(a!) x) -> (Tensor, Tensor[])");
  m.def("largest(Tensor x) -> (Tensor values, float value)");
  m.def("count(Tensor x) -> SymInt");
}

STABLE_TORCH_LIBRARY_IMPL(exportkit_probe, CPU, m) {
  m.impl("without_fake", TORCH_BOX(&same));
  m.impl("wrong_dtype", TORCH_BOX(&same));
  m.impl("wrong_strides", TORCH_BOX(&same));
  m.impl("wrong_batch", TORCH_BOX(&same));
  m.impl("good", TORCH_BOX(&same));
  m.impl("schema_in_python", TORCH_BOX(&same));
  m.impl("write", TORCH_BOX(&write));
}
