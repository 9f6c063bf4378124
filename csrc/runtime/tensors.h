// Tensors in safetensors files.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "package/atomic.h"
#include "package/safetensors.h"

namespace exportkit {

// Copies the tensors from a file's content: std::invalid_argument if it is malformed.
std::map<std::string, at::Tensor> parse_tensors(std::string_view content);

// A file that is read tensor by tensor. Data are read on demand, not mapped: if the file is cut short meanwhile, that
// is an error and not a crash.
class SafetensorsFile {
 public:
  // Throws std::system_error if the file cannot be read, and std::invalid_argument if it is no safetensors file.
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

// Writes a file that gets its name when it is complete. std::system_error: it cannot be written. std::invalid_argument:
// the format lacks a dtype.
void write_tensors(const std::string& path, mode_t mode, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   const safetensors::Metadata& metadata = {});

}  // namespace exportkit
