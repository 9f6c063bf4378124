// An operator whose library travels in the golden package: tensors of a list, one that may be absent, a number by name.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

using torch::stable::Tensor;

namespace {

template <class T>
void add(const Tensor& x, double by, Tensor& out) {
  for (int64_t i = 0; i < x.numel(); ++i) out.mutable_data_ptr<T>()[i] += x.const_data_ptr<T>()[i] * T(by);
}

Tensor scaled_sum(std::vector<Tensor> xs, std::optional<Tensor> bias, double by) {
  const bool wide = xs[0].scalar_type() == torch::headeronly::ScalarType::Double;
  STD_TORCH_CHECK(wide || xs[0].scalar_type() == torch::headeronly::ScalarType::Float, "scaled_sum: float32 or float64");
  Tensor out = torch::stable::new_empty(xs[0], xs[0].sizes());
  torch::stable::fill_(out, 0);
  for (const Tensor& x : xs) wide ? add<double>(x, by, out) : add<float>(x, by, out);
  if (bias) wide ? add<double>(*bias, 1, out) : add<float>(*bias, 1, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(golden, m) { m.def("scaled_sum(Tensor[] xs, Tensor? bias=None, *, float by=1.) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(golden, CPU, m) { m.impl("scaled_sum", TORCH_BOX(&scaled_sum)); }
