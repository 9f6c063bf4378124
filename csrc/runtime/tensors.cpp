#include "runtime/tensors.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "exportkit/runtime.h"
#include "package/container.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

[[noreturn]] void cannot(const std::string& path) { throw std::system_error(errno, std::generic_category(), path); }

}  // namespace

std::map<std::string, at::Tensor> parse_tensors(std::string_view content) {
  std::map<std::string, at::Tensor> tensors;
  for (const safetensors::View& view : safetensors::parse(content)) {
    at::Tensor tensor = at::empty(view.shape, dtype_of(view.dtype));
    if (!view.data.empty()) std::memcpy(tensor.mutable_data_ptr(), view.data.data(), view.data.size());
    tensors.emplace(view.name, std::move(tensor));
  }
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) cannot(path);
  struct stat status{};
  if (fstat(fd_.get(), &status) != 0) cannot(path);
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument("it is not a plain file");
  const auto size = static_cast<uint64_t>(status.st_size);
  const uint64_t header_size = safetensors::header_size(read_at(fd_.get(), 0, 8));
  const std::string header = read_at(fd_.get(), 0, std::min(header_size, size));
  places = safetensors::parse_header(header, size);
  metadata = safetensors::parse_metadata(header);
}

at::Tensor SafetensorsFile::read(const safetensors::Place& place) const {
  at::Tensor tensor = at::empty(place.shape, dtype_of(place.dtype));
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  if (read_at(fd_.get(), place.begin, data, tensor.nbytes()) < tensor.nbytes()) {
    throw std::invalid_argument("it became shorter while it was read");
  }
  return tensor;
}

void write_tensors(const std::string& path, mode_t mode, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   const safetensors::Metadata& metadata) {
  std::vector<at::Tensor> kept;
  std::vector<safetensors::View> views;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& plain = kept.emplace_back(tensor.detach().cpu().contiguous());
    views.push_back({name,
                     dtype_name(plain.scalar_type()),
                     plain.sizes().vec(),
                     {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()}});
  }
  const auto [header, ordered] = safetensors::header(views, metadata);
  WrittenWhole file(path, mode);
  file.write(header);
  for (const safetensors::View* view : ordered) file.write(view->data);
  file.finish(/*durable=*/true);
}

std::map<std::string, at::Tensor> read_safetensors(const std::string& path) {
  return read_file({errors::kUsage, errors::kInput}, "", path, [](const SafetensorsFile& file) {
    std::map<std::string, at::Tensor> tensors;
    for (const safetensors::Place& place : file.places) tensors.emplace(place.name, file.read(place));
    return tensors;
  });
}

void write_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors) {
  try {
    write_tensors(path, 0666, {tensors.begin(), tensors.end()});
  } catch (const std::system_error& error) {
    throw Error(errors::kUsage, "cannot write " + path + ": " + error.code().message());
  }
}

}  // namespace exportkit
