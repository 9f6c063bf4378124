// Describes the methods of a model and its state, as the manifest says.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "exportkit/runtime.h"
#include "package/manifest.h"

namespace exportkit {

using Sizes = std::map<std::string, int64_t>;  // the number of each dimension

std::vector<MethodInfo> describe_methods(const Manifest& manifest);
std::vector<TensorInfo> describe_state(const Manifest& manifest);
// The dimensions of the state's sizes, in the order in which they appear there.
std::vector<DimensionRange> state_dimensions(const Manifest& manifest);

// UsageError if one of the dimensions is not given or is out of its range, or another one is given. `whose` says who
// has these dimensions, such as "the method decode".
void check_sizes(const std::vector<DimensionRange>& dimensions, const Sizes& given, const std::string& whose);

// Inputs with checked sizes, and any values.
std::vector<at::Tensor> inputs_of(const Call& call, const Sizes& sizes, at::Device device);

}  // namespace exportkit
