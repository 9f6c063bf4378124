#include "runtime/safetensors_file.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "package/container.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

[[noreturn]] void cannot(const std::string& path) { throw std::system_error(errno, std::generic_category(), path); }

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) cannot(path);
  struct stat status{};
  if (fstat(fd_.get(), &status) != 0) cannot(path);
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument("it is not a plain file");
  const auto size = static_cast<uint64_t>(status.st_size);
  const uint64_t header_size = safetensors::header_size(read_at(fd_.get(), 0, 8));
  const std::string header = read_at(fd_.get(), 0, std::min(header_size, size));
  places_ = safetensors::parse_header(header, size);
  metadata_ = safetensors::parse_metadata(header);
}

at::Tensor SafetensorsFile::read(const safetensors::Place& place) const {
  at::Tensor tensor = at::empty(place.shape, dtype_of(place.dtype));
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  if (read_at(fd_.get(), place.begin, data, tensor.nbytes()) < tensor.nbytes()) {
    throw std::invalid_argument("it became shorter while it was read");
  }
  return tensor;
}

}  // namespace exportkit
