// Inputs and outputs, as Triton's configuration has them.
#pragma once

#include <exportkit/exportkit.h>

#include <span>
#include <string>
#include <vector>

#include "triton/config.h"
#include "triton/triton_interface.h"

namespace exportkit::triton {

using TensorInfos = std::span<const exportkit_tensor_info* const>;

// Failure: Triton has no such dtype.
TRITONSERVER_DataType triton_dtype(const exportkit_tensor_info& tensor);

// `batched`: the first size is the rows of a batch, which the configuration does not have.
std::string tensors_config(TensorInfos tensors, bool batched);

// Checks what config.pbtxt says of the inputs or outputs, of which it may have to list `all`. Failure.
void check_given(const std::string& kind, const std::vector<GivenTensor>& given, TensorInfos tensors, bool batched,
                 bool all);

}  // namespace exportkit::triton
