// Tensors in safetensors files.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <string_view>

namespace exportkit {

// The tensors of a file's content, copied out of it: std::invalid_argument says what is wrong with it.
std::map<std::string, at::Tensor> parse_tensors(std::string_view content);

}  // namespace exportkit
