// Operators that find in data how many rows there are, and one that ends the process.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// The rows with a score above 0 that are not within a distance of an earlier one, in their first column.
template <typename T>
std::vector<int64_t> kept_rows(const T* rows, const T* scores, int64_t count, int64_t width, double distance) {
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < count; ++i) {
    const bool near = std::any_of(kept.begin(), kept.end(), [&](int64_t k) {
      return std::abs(rows[i * width] - rows[k * width]) <= distance;
    });
    if (scores[i] > 0 && !near) kept.push_back(i);
  }
  return kept;
}

Tensor keep(const Tensor rows, const Tensor scores, double distance) {
  const auto count = rows.size(0), width = rows.size(1);
  const auto kept =
      rows.scalar_type() == ScalarType::Double
          ? kept_rows(rows.const_data_ptr<double>(), scores.const_data_ptr<double>(), count, width, distance)
          : kept_rows(rows.const_data_ptr<float>(), scores.const_data_ptr<float>(), count, width, distance);
  Tensor out = torch::stable::new_empty(rows, {static_cast<int64_t>(kept.size())}, ScalarType::Long);
  std::copy(kept.begin(), kept.end(), out.mutable_data_ptr<int64_t>());
  return out;
}

template <typename T>
void abort_at_nan(const Tensor& x) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (std::isnan(x.const_data_ptr<T>()[i])) std::abort();
  }
}

Tensor fragile(const Tensor x, bool wide) {
  if (!wide && x.scalar_type() == ScalarType::Float) abort_at_nan<float>(x);
  if (wide && x.scalar_type() == ScalarType::Double) abort_at_nan<double>(x);
  return torch::stable::clone(x);
}

}  // namespace

STABLE_TORCH_LIBRARY(kept_rows, m) {
  m.def("keep(Tensor rows, Tensor scores, float distance) -> Tensor");
  m.def("keep_two(Tensor rows, Tensor scores, float distance) -> Tensor");
  m.def("fragile(Tensor x, bool wide) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kept_rows, CPU, m) {
  m.impl("keep", TORCH_BOX(&keep));
  m.impl("keep_two", TORCH_BOX(&keep));
  m.impl("fragile", TORCH_BOX(&fragile));
}
