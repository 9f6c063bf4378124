// Kernels that take a schema's float as `float`, which the stable ABI does not notice, and one that takes a double.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

using torch::stable::Tensor;

namespace {

template <typename Number>
Tensor scaled(const Tensor x, Number by) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float && x.is_contiguous(), "x must be float32");
  Tensor out = torch::stable::new_empty(x, x.sizes());
  for (int64_t i = 0; i < x.numel(); ++i) out.mutable_data_ptr<float>()[i] = x.const_data_ptr<float>()[i] * float(by);
  return out;
}

Tensor scaled_or_same(const Tensor x, std::optional<float> by) { return scaled<float>(x, by.value_or(1)); }

Tensor scaled_by_first(const Tensor x, std::vector<float> by) { return scaled<float>(x, by.empty() ? 1 : by[0]); }

}  // namespace

STABLE_TORCH_LIBRARY(floats, m) {
  m.def("as_double(Tensor x, float by) -> Tensor");
  m.def("as_float(Tensor x, float by) -> Tensor");
  m.def("as_optional(Tensor x, float? by=2.0) -> Tensor");
  m.def("as_list(Tensor x, float[] by) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(floats, CPU, m) {
  m.impl("as_double", TORCH_BOX(&scaled<double>));
  m.impl("as_float", TORCH_BOX(&scaled<float>));
  m.impl("as_optional", TORCH_BOX(&scaled_or_same));
  m.impl("as_list", TORCH_BOX(&scaled_by_first));
}
