// Kernels for all devices, which torch takes for composites of other operators.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

namespace {

// With the pointer's own type, torch raises for a tensor without memory; without, it returns null.
Tensor twice(const Tensor x) {
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  const float* from = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = 2 * from[i];
  return out;
}

void halve_(Tensor x) {
  float* each = static_cast<float*>(x.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) each[i] /= 2;
}

Tensor positive(const Tensor x) {
  const float* from = x.const_data_ptr<float>();
  int64_t count = 0;
  for (int64_t i = 0; i < x.numel(); ++i) count += from[i] > 0;
  const Tensor out = torch::stable::new_empty(x, std::vector<int64_t>{count});
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0, n = 0; i < x.numel(); ++i) {
    if (from[i] > 0) to[n++] = from[i];
  }
  return out;
}

// It writes nothing itself.
Tensor filled_with_first(const Tensor x) {
  return torch::stable::fill_(torch::stable::new_empty(x, x.sizes()), static_cast<const float*>(x.const_data_ptr())[0]);
}

Tensor parts(const Tensor x) { return torch::stable::sum(torch::stable::flatten(x)); }

}  // namespace

STABLE_TORCH_LIBRARY(exportkit_opaque, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.def("halve_(Tensor(a!) x) -> ()");
  m.def("positive(Tensor x) -> Tensor");
  m.def("filled_with_first(Tensor x) -> Tensor");
  m.def("parts(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exportkit_opaque, CompositeImplicitAutograd, m) {
  m.impl("twice", TORCH_BOX(&twice));
  m.impl("halve_", TORCH_BOX(&halve_));
  m.impl("positive", TORCH_BOX(&positive));
  m.impl("filled_with_first", TORCH_BOX(&filled_with_first));
  m.impl("parts", TORCH_BOX(&parts));
}
