// Operators that a stranger's library may have, each with something that an export must not pass over.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

static Tensor same(const Tensor& x) { return torch::stable::clone(x); }

// At most 6 rows, where the fake says all of them.
static Tensor first_rows(const Tensor& x) {
  return torch::stable::clone(torch::stable::narrow(const_cast<Tensor&>(x), 0, 0, x.size(0) < 6 ? x.size(0) : 6));
}

// A composite kernel: torch.export traces through it, and in C++ the size is a number, the example's.
static Tensor zeros_like_rows(const Tensor& x) { return torch::stable::new_zeros(x, {x.size(0), 3}); }

STABLE_TORCH_LIBRARY(exportkit_gallery, m) {
  m.def("without_fake(Tensor x) -> Tensor");
  m.def("wrong_signature(Tensor x) -> Tensor");
  m.def("wrong_beyond(Tensor x) -> Tensor");
  m.def("without_kernel(Tensor x) -> Tensor");
  m.def("good(Tensor x) -> Tensor");
  m.def("copied(Tensor x) -> Tensor");
  m.def("composite(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exportkit_gallery, CPU, m) {
  m.impl("without_fake", TORCH_BOX(&same));
  m.impl("wrong_signature", TORCH_BOX(&same));
  m.impl("wrong_beyond", TORCH_BOX(&first_rows));
  m.impl("good", TORCH_BOX(&same));
  m.impl("copied", TORCH_BOX(&same));
}

STABLE_TORCH_LIBRARY_IMPL(exportkit_gallery, CompositeImplicitAutograd, m) {
  m.impl("composite", TORCH_BOX(&zeros_like_rows));
}
