// Argument checks. An operator's adapter calls them on both devices, because Python, torch.compile and AOTInductor all
// call the kernels directly. exportkit/operators/contract/layout.py has the same messages for the fakes.
#pragma once

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "arr_coc/common/dispatch.h"

namespace arr_coc {

// A tensor's sizes or strides, formatted only when a check fails.
struct PerDimension {
  const Tensor& tensor;
  int64_t (Tensor::*of)(int64_t) const;
};

inline std::ostream& operator<<(std::ostream& text, const PerDimension& numbers) {
  const auto& [tensor, of] = numbers;
  text << '[';
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text << (dim ? ", " : "") << (tensor.*of)(dim);
  return text << ']';
}

inline PerDimension shape_of(const Tensor& tensor) { return {tensor, &Tensor::size}; }
inline PerDimension strides_of(const Tensor& tensor) { return {tensor, &Tensor::stride}; }

// A part of a message: one type for all that messages have, so that they are written by one function.
class Part {
 public:
  Part(const char* text)
      : value_(text), write_([](std::ostream& out, const void* value) { out << static_cast<const char*>(value); }) {}

  template <class T>
  Part(const T& value)
      : value_(&value), write_([](std::ostream& out, const void* value) { out << *static_cast<const T*>(value); }) {}

  void write(std::ostream& out) const { write_(out, value_); }

 private:
  const void* value_;
  void (*write_)(std::ostream&, const void*);
};

[[noreturn, gnu::noinline, gnu::cold]] inline void fail(std::initializer_list<Part> parts) {
  std::ostringstream message;
  for (const Part& part : parts) part.write(message);
  throw std::runtime_error(message.str());
}

template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) fail({parts...});
}

inline const char* dtype_name(ScalarType dtype) {
  constexpr std::pair<ScalarType, const char*> kNames[] = {
      {ScalarType::Float, "float32"},     {ScalarType::Double, "float64"}, {ScalarType::Half, "float16"},
      {ScalarType::BFloat16, "bfloat16"}, {ScalarType::Bool, "bool"},      {ScalarType::Byte, "uint8"},
      {ScalarType::Char, "int8"},         {ScalarType::Short, "int16"},    {ScalarType::Int, "int32"},
      {ScalarType::Long, "int64"}};
  for (const auto& [known, name] : kNames)
    if (known == dtype) return name;
  return torch::headeronly::toString(dtype);
}

inline void check_floating(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
            dtype == ScalarType::BFloat16,
        op, ": ", name, " must be float32, float64, float16 or bfloat16, got ", dtype_name(dtype));
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, ScalarType expected) {
  check(tensor.scalar_type() == expected, op, ": ", name, " must be ", dtype_name(expected), ", got ",
        dtype_name(tensor.scalar_type()));
}

// `layout` names the dimensions for the message, such as "[B, N, D]".
inline void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank, const char* layout) {
  check(tensor.dim() == rank, op, ": ", name, " must be ", layout, ", got shape ", shape_of(tensor));
}

// Checks that two tensors have the same size in a dimension: "lab has B = 3, rgb has B = 2".
inline void check_same_size(const char* op, const char* symbol, const char* name, int64_t size, const char* other_name,
                            int64_t other_size) {
  check(size == other_size, op, ": ", name, " has ", symbol, " = ", size, ", ", other_name, " has ", symbol, " = ",
        other_size, "; they must be equal");
}

// Checks that a tensor has the dtype and device of the first.
inline void check_alike(const char* op, const char* first_name, const Tensor& first, const char* name,
                        const Tensor& tensor) {
  check(tensor.scalar_type() == first.scalar_type(), op, ": ", name, " is ", dtype_name(tensor.scalar_type()), ", ",
        first_name, " is ", dtype_name(first.scalar_type()), "; they must have one dtype");
  check(tensor.device() == first.device(), op, ": ", name, " and ", first_name, " must be on one device");
}

// Checks features [B, N, D] with D >= 1.
inline void check_features(const char* op, const Tensor& features) {
  check_rank(op, "features", features, 3, "[B, N, D]");
  check_floating(op, "features", features);
  check(features.size(2) > 0, op, ": features must have D >= 1, got shape ", shape_of(features));
}

// Checks the gradient of an output [B, N] of features [B, N, D].
inline void check_patch_grad(const char* op, const Tensor& grad, const Tensor& features) {
  check_rank(op, "grad", grad, 2, "[B, N]");
  check_alike(op, "features", features, "grad", grad);
  check_same_size(op, "B", "grad", grad.size(0), "features", features.size(0));
  check_same_size(op, "N", "grad", grad.size(1), "features", features.size(1));
}

// Checks a row [D] for x [..., D].
inline void check_row(const char* op, const char* name, const Tensor& row, const Tensor& x) {
  check_rank(op, name, row, 1, "[D]");
  check_alike(op, "x", x, name, row);
  check_same_size(op, "D", name, row.size(0), "x", x.size(-1));
}

// Checks x [..., D] with D >= 1 and weight [D].
inline void check_rows_and_weight(const char* op, const Tensor& x, const Tensor& weight) {
  check_floating(op, "x", x);
  check(x.dim() >= 1 && x.size(-1) >= 1, op, ": x must be [..., D] with D >= 1, got shape ", shape_of(x));
  check_row(op, "weight", weight, x);
}

// Checks that patches divide an image [B, C, H, W].
inline void check_patch_size(const char* op, const Tensor& image, int64_t patch_size) {
  check(patch_size > 0, op, ": patch_size must be >= 1, got ", patch_size);
  check(image.size(2) % patch_size == 0, op, ": H = ", image.size(2),
        " is not a multiple of patch_size = ", patch_size);
  check(image.size(3) % patch_size == 0, op, ": W = ", image.size(3),
        " is not a multiple of patch_size = ", patch_size);
}

inline void check_same_shape(const char* op, const char* first_name, const Tensor& first, const char* name,
                             const Tensor& tensor) {
  check(tensor.sizes().equals(first.sizes()), op, ": ", name, " has shape ", shape_of(tensor), ", ", first_name,
        " has shape ", shape_of(first), "; they must be equal");
}

}  // namespace arr_coc
