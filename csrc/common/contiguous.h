#pragma once

#include <torch/csrc/stable/ops.h>

namespace arr_coc {

// The tensor itself where it is contiguous: asking the dispatcher would take a microsecond, in a call of ten.
inline torch::stable::Tensor as_contiguous(const torch::stable::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace arr_coc
