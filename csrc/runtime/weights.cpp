#include "runtime/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "package/container.h"
#include "package/errors.h"
#include "package/safetensors.h"
#include "package/state_matching.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

using safetensors::Place;

[[noreturn]] void cannot(const std::string& path) { throw std::system_error(errno, std::generic_category(), path); }

// A safetensors file. Data are read on demand, not mapped: if the file is cut short meanwhile, that is an error and not
// a crash.
class StateFile {
 public:
  // std::system_error, std::invalid_argument.
  explicit StateFile(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (fd_ < 0) cannot(path);
    try {
      struct stat status{};
      if (fstat(fd_, &status) != 0) cannot(path);
      if (!S_ISREG(status.st_mode)) throw std::invalid_argument("it is not a plain file");
      const auto size = static_cast<uint64_t>(status.st_size);
      const uint64_t header = safetensors::header_size(read_at(fd_, 0, 8));
      places_ = safetensors::parse_header(read_at(fd_, 0, std::min(header, size)), size);
    } catch (...) {
      close(fd_);
      throw;
    }
  }
  ~StateFile() { close(fd_); }
  StateFile(const StateFile&) = delete;
  StateFile& operator=(const StateFile&) = delete;

  const std::vector<Place>& places() const { return places_; }

  // A contiguous copy.
  at::Tensor read(const Place& place) const {
    at::Tensor tensor = at::empty(place.shape, dtype_of(place.dtype));
    auto* data = static_cast<char*>(tensor.mutable_data_ptr());
    if (read_at(fd_, place.begin, data, tensor.nbytes()) < tensor.nbytes()) {
      throw std::invalid_argument("it became shorter while it was read");
    }
    return tensor;
  }

 private:
  int fd_;
  std::vector<Place> places_;
};

// Whether two tensors of one dtype and shape have the same bytes.
bool same_content(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor left = one.contiguous(), right = other.contiguous();
  return left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

// Copies a tensor to the strides that the code was compiled for.
at::Tensor laid_out(const at::Tensor& tensor, const Weight& weight) {
  if (tensor.strides().equals(weight.strides)) return tensor;
  return at::empty_strided(weight.shape, weight.strides, tensor.options()).copy_(tensor);
}

// Reads a tied weight, whose given tensors must be equal.
at::Tensor read_tied(const StateFile& file, const std::vector<const Place*>& places) {
  at::Tensor first = file.read(*places.front());
  for (const Place* other : places) {
    if (other == places.front() || same_content(first, file.read(*other))) continue;
    throw Error(errors::kWeights,
                places.front()->name + " and " + other->name + " differ; they are one tensor in the model",
                "Export the model again with untied weights, or give only one of the two.");
  }
  return first;
}

bool is_inside(const Target& target, const Weight& weight) {
  return std::none_of(target.constants.begin(), target.constants.end(),
                      [&](const auto& constant) { return constant.second == weight.name; });
}

Weights replaced_by(const StateFile& file, const Manifest& manifest, const Target& target, const Weights& packaged) {
  const auto places = match_state(manifest.weights, manifest.state, file.places());
  Weights weights = packaged;
  for (const Weight& weight : manifest.weights) {
    if (!weight.state) continue;
    const std::vector<const Place*>& given = places.at(weight.name);
    if (!weight.record && given.size() == 1) continue;
    const at::Tensor tensor = read_tied(file, given);
    if (!weight.record) continue;
    if (is_inside(target, weight) && !same_content(tensor, packaged.at(weight.name))) {
      throw Error(errors::kWeights,
                  weight.name + " differs from the package's, which is built into the code of target " + target.name,
                  "Export the model with these weights.");
    }
    weights[weight.name] = laid_out(tensor, weight);
  }
  return weights;
}

}  // namespace

MappedWeights::MappedWeights(const PackageReader& reader) : mapping_(reader) {
  for (const Weight& weight : reader.manifest().weights) {
    if (!weight.record) continue;
    char* data = const_cast<char*>(mapping_.data(*weight.record));  // at::from_blob takes no const pointer
    tensors_.emplace(weight.name, at::from_blob(data, weight.shape, weight.strides, dtype_of(weight.dtype)));
  }
}

Constants constants_of(const Target& target, const Weights& weights) {
  Constants constants;
  // The manifest was checked: the weight exists and has a record.
  for (const auto& [constant, name] : target.constants) constants.emplace(constant, weights.at(name));
  return constants;
}

Weights replaced_weights(const Manifest& manifest, const Target& target, const Weights& packaged,
                         const std::string& path) {
  try {
    return replaced_by(StateFile(path), manifest, target, packaged);
  } catch (const std::system_error& error) {
    throw Error(errors::kWeights, "cannot read the weights " + path + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kWeights, path + " is not a safetensors file: " + error.what());
  }
}

}  // namespace exportkit
