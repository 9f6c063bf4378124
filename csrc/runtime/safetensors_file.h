// A safetensors file that is read tensor by tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "package/atomic.h"
#include "package/safetensors.h"

namespace exportkit {

// Data are read on demand, not mapped: if the file is cut short meanwhile, that is an error and not a crash.
class SafetensorsFile {
 public:
  // std::system_error: it cannot be read. std::invalid_argument: it is no safetensors file.
  explicit SafetensorsFile(const std::string& path);

  // The tensors, sorted by name.
  const std::vector<safetensors::Place>& places() const { return places_; }
  const safetensors::Metadata& metadata() const { return metadata_; }

  // A contiguous copy on the CPU. Throws as the constructor does.
  at::Tensor read(const safetensors::Place& place) const;

 private:
  Descriptor fd_;
  std::vector<safetensors::Place> places_;
  safetensors::Metadata metadata_;
};

}  // namespace exportkit
