// Tensors in safetensors files.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <string_view>

namespace exportkit {

// Copies the tensors from a file's content: std::invalid_argument if it is malformed.
std::map<std::string, at::Tensor> parse_tensors(std::string_view content);

}  // namespace exportkit
