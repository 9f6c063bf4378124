// An output's memory.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/dispatch.h"

namespace arr_coc {

// A contiguous tensor on the device of `like`, of its dtype where none is named. torch::stable::new_empty is a call
// through the dispatcher, by name and with boxed arguments, which takes half a microsecond longer.
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
