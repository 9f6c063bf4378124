// The tensors of a session's state: what they begin with, and their files.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "package/reader.h"
#include "runtime/methods.h"

namespace exportkit {

// What every session's state begins with, on the model's device.
class InitialState {
 public:
  // Reads the records: DigestMismatchError.
  InitialState(const PackageReader& reader, c10::Device device);

  // New tensors with these sizes, which must have been checked; the lazy ones are shared. ModelRunError: no room.
  std::vector<at::Tensor> make(const Sizes& sizes) const;
  // Writes the first values over a state's, but for those that are shared.
  void restore(const std::vector<at::Tensor>& state, const std::set<size_t>& shared) const;
  // What sessions share until they write it: of a fixed size, and not written by some method.
  const std::set<size_t>& lazy() const { return lazy_; }
  // Whether a tensor begins as zeros. Shared, these have one element, which is everywhere.
  bool begins_as_zeros(size_t index) const { return !first_[index]; }
  // Whether a tensor on the CPU has the first values of the state at `index`, bit for bit, in any number of rows.
  bool begins_with(size_t index, const at::Tensor& given) const;

 private:
  const std::vector<StateTensor>& described_;
  c10::Device device_;
  std::vector<std::optional<at::Tensor>> first_;  // with one row where rows are alike; nothing for zeros
  std::set<size_t> lazy_;
};

// Whether two tensors of one dtype and shape, on the CPU, have the same bytes.
bool same_content(const at::Tensor& one, const at::Tensor& other);

// Copies of a state's tensors, but for those that are shared: ModelRunError as above.
std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& state, const std::set<size_t>& shared = {});

// Writes a state to a safetensors file, which gets its name when it is complete: StateError.
void save_state(const Manifest& manifest, const std::vector<at::Tensor>& state, const std::string& path);
// By index, on the CPU. One without the state's rows is every row's.
using StateTensors = std::vector<std::pair<size_t, at::Tensor>>;
// Reads a whole state of these sizes, or what a file has of one, for all rows or for one (package/state_files.h).
// StateError: the file does not exist, is no state of this model, or does not fit.
StateTensors read_state(const Manifest& manifest, const Sizes& sizes, const std::string& path);
StateTensors read_part_of_state(const Manifest& manifest, const Sizes& sizes, const std::string& path, bool one_row);

}  // namespace exportkit
