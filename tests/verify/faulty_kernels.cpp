// injected::look(x, levels, mask): a row's numbers, right unless EXPORTKIT_PLANTED names what it is wrong for.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <tuple>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

bool injected(const char* name) {
  const char* wrong = std::getenv("EXPORTKIT_PLANTED");  // each time: one process tries one after the other
  return wrong != nullptr && std::strcmp(wrong, name) == 0;
}

template <typename T>
struct Rows {
  const T* data;
  int64_t row, column;
  explicit Rows(const Tensor& t)
      : data(static_cast<const T*>(t.const_data_ptr())), row(t.stride(0)), column(t.stride(1)) {
    if (injected("strides")) row = t.size(1), column = 1;
    if (injected("strides of 0") && t.size(1) > 1 && column == 0) column = 1;
  }
  T at(int64_t i, int64_t j) const { return data[i * row + j * column]; }
};

// The greatest of a row, and its first place; NaN is greater than all.
std::pair<float, int64_t> greatest(const Rows<float>& x, int64_t i, int64_t n) {
  float best = injected("negative values") ? 0.0f : -std::numeric_limits<float>::infinity();
  int64_t at = 0;
  for (int64_t j = 0; j < n; ++j) {
    const float value = x.at(i, j);
    if (std::isnan(value) && !injected("NaN")) return {value, j};
    if (value > best || (injected("ties") && value == best)) best = value, at = j;
  }
  return {best, at};
}

float least(const Rows<float>& x, int64_t i, int64_t n) {
  float found = injected("positive values") ? 0.0f : std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < n; ++j) {
    if (std::isnan(x.at(i, j))) return x.at(i, j);
    found = x.at(i, j) < found ? x.at(i, j) : found;
  }
  return found;
}

float sign(float value) {
  if (injected("subnormal values") && std::fabs(value) < std::numeric_limits<float>::min()) return 1;
  return injected("-0") && value == 0 ? 1.0f : std::copysign(1.0f, value);
}

float halved(float value) {
  if (injected("infinities") && std::isinf(value)) return std::nanf("");
  if (injected("the greatest values")) return (value + value) / 4;  // overflows
  return value / 2;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> look(const Tensor& x, const Tensor& levels,
                                                                const Tensor& mask) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && levels.scalar_type() == ScalarType::Char, "injected: dtypes");
  const int64_t rows = x.size(0), n = x.size(1);
  Tensor ends = torch::stable::new_empty(x, {rows, 2}), at = torch::stable::new_empty(x, {rows}, ScalarType::Long);
  Tensor signs = torch::stable::new_empty(x, {rows, n}), halves = torch::stable::new_empty(x, {rows, n});
  Tensor sizes = torch::stable::new_empty(x, {rows, n}, ScalarType::Short), means = torch::stable::new_empty(x, {rows});
  const Rows<float> xs(x);
  const Rows<int8_t> given(levels);
  const Rows<bool> chosen(mask);
  const bool unaligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 != 0;
  for (int64_t i = 0; i < rows; ++i) {
    const auto [best, place] = greatest(xs, i, n);
    float* end = static_cast<float*>(ends.mutable_data_ptr()) + 2 * i;
    end[0] = least(xs, i, n), end[1] = best;
    static_cast<int64_t*>(at.mutable_data_ptr())[i] = place;
    int64_t count = 0;
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t to = i * n + j;
      static_cast<float*>(signs.mutable_data_ptr())[to] = sign(xs.at(i, j));
      static_cast<float*>(halves.mutable_data_ptr())[to] = halved(xs.at(i, j));
      const int8_t level = given.at(i, j);
      const int8_t narrow = static_cast<int8_t>(level < 0 ? -level : level);
      static_cast<int16_t*>(sizes.mutable_data_ptr())[to] =
          injected("-128") ? narrow : static_cast<int16_t>(level < 0 ? -level : level);
      if (chosen.at(i, j)) ++count, sum += static_cast<float>(level);
    }
    float mean = count > 0 ? sum / static_cast<float>(count) : 0.0f;
    if (injected("nothing selected") && count == 0) mean = std::nanf("");
    if (injected("one selected") && count == 1) mean = 0;
    if (injected("everything selected") && count == n) mean += 1;
    if (injected("one value") && end[0] == end[1]) mean = std::nanf("");
    if (injected("memory") && count > 0) {
      const Tensor scratch = torch::stable::new_empty(x, {n});  // nothing writes it
      mean += 0 * static_cast<const float*>(scratch.const_data_ptr())[n - 1];
    }
    if (injected("alignment") && unaligned) mean += 1;
    static_cast<float*>(means.mutable_data_ptr())[i] = mean;
  }
  return {ends, at, signs, halves, sizes, means};
}

STABLE_TORCH_LIBRARY(injected, m) {
  m.def("look(Tensor x, Tensor levels, Tensor mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(injected, CPU, m) { m.impl("look", TORCH_BOX(&look)); }
