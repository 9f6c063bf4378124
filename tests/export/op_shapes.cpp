// Operators with every kind of argument and result that a package can hold.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

Tensor like(const Tensor& x) { return torch::stable::new_empty(x, x.sizes()); }

void add(const Tensor& a, const Tensor& b, Tensor& out) {
  for (int64_t i = 0; i < a.numel(); ++i) {
    out.mutable_data_ptr<float>()[i] = a.const_data_ptr<float>()[i] + b.const_data_ptr<float>()[i];
  }
}

Tensor scaled(const Tensor& x, double by) {
  Tensor out = like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.mutable_data_ptr<float>()[i] = x.const_data_ptr<float>()[i] * float(by);
  return out;
}

void add_out(const Tensor a, const Tensor b, Tensor out) { add(a, b, out); }

void twice_(Tensor x) { add(x, x, x); }

Tensor scaled_by_number(const Tensor x, double by) { return scaled(x, by); }

Tensor scaled_by_tensor(const Tensor x, const Tensor by) { return scaled(x, by.const_data_ptr<float>()[0]); }

Tensor sum_of(std::vector<Tensor> xs, std::optional<Tensor> bias, std::vector<int64_t> weights) {
  Tensor out = scaled(xs[0], 0);
  for (size_t i = 0; i < xs.size(); ++i) add(out, scaled(xs[i], double(weights[i])), out);
  if (bias) add(out, *bias, out);
  return out;
}

std::vector<Tensor> halves(const Tensor x) { return {scaled(x, 0.5), scaled(x, 0.5)}; }

Tensor filled(const Tensor x, std::optional<ScalarType> dtype, torch::stable::Device device, std::string how) {
  STD_TORCH_CHECK(device.type() == torch::headeronly::DeviceType::CPU, "filled: a CPU kernel");
  const Tensor out = torch::stable::new_empty(x, x.sizes(), dtype);
  return torch::stable::fill_(out, how == "ones" ? 1 : 0);
}

Tensor negated(const Tensor x) { return scaled(x, -1); }

// It has no kernel for a device: it calls another operator.
Tensor minus(const Tensor x) {
  StableIValue stack[] = {torch::stable::detail::from(x)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("op_shapes::negated", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor positive(const Tensor x) {
  std::vector<float> kept;
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (x.const_data_ptr<float>()[i] > 0) kept.push_back(x.const_data_ptr<float>()[i]);
  }
  const std::vector<int64_t> size = {int64_t(kept.size())};
  Tensor out = torch::stable::new_empty(x, size);
  std::copy(kept.begin(), kept.end(), out.mutable_data_ptr<float>());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(op_shapes, m) {
  m.def("add_out(Tensor a, Tensor b, Tensor(a!) out) -> ()");
  m.def("twice_(Tensor(a!) x) -> ()");
  m.def("scaled(Tensor x, float by) -> Tensor");
  m.def("scaled.Tensor(Tensor x, Tensor by) -> Tensor");
  m.def("sum_of(Tensor[] xs, Tensor? bias=None, *, int[] weights) -> Tensor");
  m.def("halves(Tensor x) -> Tensor[]");
  m.def("filled(Tensor x, ScalarType? dtype, Device device, str how) -> Tensor");
  m.def("negated(Tensor x) -> Tensor");
  m.def("minus(Tensor x) -> Tensor");
  m.def("positive(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(op_shapes, CPU, m) {
  m.impl("add_out", TORCH_BOX(&add_out));
  m.impl("twice_", TORCH_BOX(&twice_));
  m.impl("scaled", TORCH_BOX(&scaled_by_number));
  m.impl("scaled.Tensor", TORCH_BOX(&scaled_by_tensor));
  m.impl("sum_of", TORCH_BOX(&sum_of));
  m.impl("halves", TORCH_BOX(&halves));
  m.impl("filled", TORCH_BOX(&filled));
  m.impl("negated", TORCH_BOX(&negated));
  m.impl("positive", TORCH_BOX(&positive));
}

STABLE_TORCH_LIBRARY_IMPL(op_shapes, CompositeImplicitAutograd, m) { m.impl("minus", TORCH_BOX(&minus)); }
