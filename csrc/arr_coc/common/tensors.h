// What an adapter does with tensors: makes inputs contiguous, allocates outputs, takes their data.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "arr_coc/common/dispatch.h"

namespace arr_coc {

// Returns a contiguous tensor unchanged without calling the dispatcher, which would take 1 of a call's 10 microseconds.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::make_optional(as_contiguous(*tensor)) : std::nullopt;
}

// The same, and on CUDA a copy of one that does not begin on 16 bytes, for kernels whose code for such memory rounds
// otherwise: the compiler fuses other products and sums.
inline Tensor as_aligned(const Tensor& tensor) {
  const Tensor contiguous = as_contiguous(tensor);
  const bool aligned = reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0;
  return aligned || !contiguous.is_cuda() ? contiguous : torch::stable::clone(contiguous);
}

inline std::optional<Tensor> as_aligned(const std::optional<Tensor>& tensor) {
  return tensor ? std::make_optional(as_aligned(*tensor)) : std::nullopt;
}

// Returns a contiguous tensor. torch::stable::new_empty takes half a microsecond longer, because it calls the
// dispatcher by name with boxed arguments.
inline Tensor allocate(const torch::stable::Device& device, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = stride;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(device.type())), device.index(), &handle));
  return Tensor(handle);
}

// The same on the device of `like`, by default with its dtype.
inline Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  return allocate(like.device(), sizes, dtype.value_or(like.scalar_type()));
}

// A gradient that is not needed is an empty tensor.
inline Tensor allocate_if(bool needed, const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return needed ? allocate(like, sizes) : allocate(like, {0});
}

template <class T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

// An output's memory, or null if the output has no elements. An output that is not needed has none.
template <class T>
T* data_of(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// A tensor's memory, or null if there is no tensor.
template <class T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? data_of<T>(*tensor) : nullptr;
}

}  // namespace arr_coc
