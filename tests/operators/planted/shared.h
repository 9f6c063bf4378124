// What the kernels of kernels.cpp share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// --- what they share -------------------------------------------------------------------------------------------------

template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename F>
void of_dtype(const Tensor& x, F f) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::Half:
      return f(c10::Half{});
    case ScalarType::BFloat16:
      return f(c10::BFloat16{});
    default:
      STD_TORCH_CHECK(false, "x must be floating");
  }
}

template <typename T>
const T* read(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* write(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

Tensor like(const Tensor& x) { return torch::stable::new_empty(x, x.sizes()); }

void check_rows(const Tensor& x) { STD_TORCH_CHECK(x.dim() == 2, "x must have 2 dimensions"); }

// out[i] = f(a row, its length), of rows without gaps.
template <typename F>
Tensor by_row(const Tensor& given, F f) {
  check_rows(given);
  Tensor x = torch::stable::contiguous(given);
  Tensor out = torch::stable::new_empty(x, {x.size(0)});
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.size(0); ++i) write<T>(out)[i] = T(f(read<T>(x) + i * x.size(1), x.size(1)));
  });
  return out;
}

// f(from, to, elements), of elements without gaps.
template <typename F>
Tensor flat(const Tensor& given, F f) {
  Tensor x = torch::stable::contiguous(given);
  Tensor out = like(x);
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    f(read<T>(x), write<T>(out), x.numel());
  });
  return out;
}

template <typename T>
Sum<T> sum_of(const T* row, int64_t begin, int64_t end) {
  Sum<T> sum = 0;
  for (int64_t j = begin; j < end; ++j) sum += Sum<T>(row[j]);
  return sum;
}

template <typename T>
T halved(T value) {
  return T(Sum<T>(value) * Sum<T>(0.5));
}

}  // namespace
