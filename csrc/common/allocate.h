// Allocates outputs.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/dispatch.h"

namespace arr_coc {

// Returns a contiguous tensor on the device of `like`, by default with its dtype. torch::stable::new_empty takes half a
// microsecond longer, because it calls the dispatcher by name with boxed arguments.
inline Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = stride;
  const torch::stable::Device device = like.device();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype.value_or(like.scalar_type()))),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(device.type())), device.index(), &handle));
  return Tensor(handle);
}

}  // namespace arr_coc
