// Tensors in safetensors files.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <array>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "package/atomic.h"
#include "package/errors.h"
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

  // A contiguous copy on the CPU. Throws as the constructor does.
  at::Tensor read(const safetensors::Place& place) const;

  std::vector<safetensors::Place> places;  // of the tensors, sorted by name
  safetensors::Metadata metadata;

 private:
  Descriptor fd_;
};

// Calls `read` with a file: an error of the first class if it cannot be read, and of the second if it is no safetensors
// file. `what` is what messages call it, with a space behind.
template <class Read>
auto read_file(const std::array<ErrorClass, 2>& kinds, const char* what, const std::string& path, const Read& read) {
  try {
    return read(SafetensorsFile(path));
  } catch (const std::system_error& error) {
    throw Error(kinds[0], "cannot read " + (what + path) + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {
    throw Error(kinds[1], path + " is not a safetensors file: " + error.what());
  }
}

// Writes a file that gets its name when it is complete. std::system_error: it cannot be written. std::invalid_argument:
// the format lacks a dtype.
void write_tensors(const std::string& path, mode_t mode, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   const safetensors::Metadata& metadata = {});

}  // namespace exportkit
