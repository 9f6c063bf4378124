// What both operators share. It uses the LibTorch stable ABI only, as all of csrc.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <type_traits>

namespace paged_cache {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The type to compute in: float for float16 and bfloat16.
template <class T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The fake kernels in Python have the same messages.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// A tensor's sizes or strides, formatted only when a check fails.
struct Numbers {
  const Tensor& tensor;
  bool strides = false;
};

inline std::ostream& operator<<(std::ostream& text, const Numbers& of) {
  text << '[';
  for (int64_t dim = 0; dim < of.tensor.dim(); ++dim)
    text << (dim ? ", " : "") << (of.strides ? of.tensor.stride(dim) : of.tensor.size(dim));
  return text << ']';
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(dtype);
  }
}

// A dimension: its name, which means the same size in every tensor, and its smallest size.
struct Dim {
  Dim(const char* symbol, int64_t smallest = 0) : name(symbol), least(smallest) {}
  const char* name;
  int64_t least;
};

// Checks the tensors of a call, one after the other: their ranks, dtypes, devices and sizes.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  // A floating tensor, of the dtype of the first one.
  void tensor(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims) {
    rank(name, tensor, dims);
    const ScalarType dtype = tensor.scalar_type();
    if (!first_) {
      check(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
                dtype == ScalarType::BFloat16,
            op_, ": ", name, " must be float32, float64, float16 or bfloat16, got ", dtype_name(dtype));
      first_ = &tensor;
      first_name_ = name;
    }
    check(dtype == first_->scalar_type(), op_, ": ", name, " is ", dtype_name(dtype), ", ", first_name_, " is ",
          dtype_name(first_->scalar_type()), "; they must have one dtype");
    device_and_sizes(name, tensor, dims);
  }

  void indices(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims) {
    rank(name, tensor, dims);
    check(tensor.scalar_type() == ScalarType::Long, op_, ": ", name, " must be int64, got ",
          dtype_name(tensor.scalar_type()));
    device_and_sizes(name, tensor, dims);
  }

 private:
  struct Seen {
    const char *dim, *name;
    int64_t size;
  };

  void rank(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims) const {
    if (tensor.dim() == int64_t(dims.size())) return;
    std::ostringstream layout;
    for (const Dim& dim : dims) layout << (&dim == dims.begin() ? "" : ", ") << dim.name;
    check(false, op_, ": ", name, " must be [", layout.str(), "], got shape ", Numbers{tensor});
  }

  void device_and_sizes(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims) {
    check(tensor.device() == first_->device(), op_, ": ", name, " and ", first_name_, " must be on one device");
    int64_t place = 0;
    for (const Dim& dim : dims) {
      const int64_t size = tensor.size(place++);
      check(size >= dim.least, op_, ": ", name, " must have ", dim.name, " >= ", dim.least, ", got shape ",
            Numbers{tensor});
      const auto end = seen_.begin() + count_;
      const auto seen = std::find_if(seen_.begin(), end, [&](const Seen& s) { return !std::strcmp(s.dim, dim.name); });
      if (seen == end) {
        seen_[count_++] = {dim.name, name, size};
        continue;
      }
      check(size == seen->size, op_, ": ", name, " has ", dim.name, " = ", size, ", ", seen->name, " has ", dim.name,
            " = ", seen->size, "; they must be equal");
    }
  }

  const char* op_;
  const char* first_name_ = nullptr;
  const Tensor* first_ = nullptr;
  std::array<Seen, 8> seen_;  // as many different dimensions as an operator here may have
  size_t count_ = 0;
};

// Calls f(T{}) with the C++ type of a floating dtype.
template <class F>
void dispatch(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::Half:
      return f(Half{});
    case ScalarType::BFloat16:
      return f(BFloat16{});
    default:
      check(false, "paged_cache: unchecked dtype");
  }
}

// The device of a call on the CPU, which needs no preparation. common.cuh has that of CUDA.
struct Cpu {
  explicit Cpu(const Tensor&) {}
};

}  // namespace paged_cache
