#include "runtime/tensors.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "exportkit/runtime.h"
#include "package/errors.h"
#include "package/safetensors.h"
#include "runtime/inputs.h"

namespace exportkit {

std::map<std::string, at::Tensor> parse_tensors(std::string_view content) {
  std::map<std::string, at::Tensor> tensors;
  for (const safetensors::View& view : safetensors::parse(content)) {
    at::Tensor tensor = at::empty(view.shape, dtype_of(view.dtype));
    if (!view.data.empty()) std::memcpy(tensor.mutable_data_ptr(), view.data.data(), view.data.size());
    tensors.emplace(view.name, std::move(tensor));
  }
  return tensors;
}

std::map<std::string, at::Tensor> read_safetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw Error(errors::kUsage, "cannot read " + path);
  try {
    return parse_tensors(content);
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kInput, path + " is not a safetensors file: " + error.what());
  }
}

void write_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors) {
  std::vector<at::Tensor> kept;
  std::vector<safetensors::View> views;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& plain = kept.emplace_back(tensor.detach().cpu().contiguous());
    views.push_back({name,
                     dtype_name(plain.scalar_type()),
                     plain.sizes().vec(),
                     {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()}});
  }
  std::ofstream file(path, std::ios::binary);
  const std::string content = safetensors::serialize(views);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (!file) throw Error(errors::kUsage, "cannot write " + path);
}

}  // namespace exportkit
