// Weights outside the compiled code, mapped from the package or replaced by given ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "package/mapping.h"
#include "package/reader.h"
#include "runtime/code.h"
#include "runtime/state.h"

namespace exportkit {

using Weights = std::map<std::string, at::Tensor>;  // by the weights' names in the manifest

class MappedWeights {
 public:
  // Maps a package's weights. package/mapping.h has the rules and errors.
  explicit MappedWeights(const PackageReader& reader);

  // The weights with a record. Do not write to the tensors. They must not outlive this object.
  const Weights& tensors() const { return tensors_; }

 private:
  WeightMapping mapping_;
  Weights tensors_;
};

// The tensors that the code of a method takes from outside.
Constants constants_of(const Target& target, const std::string& method, const Weights& weights);

// Copies the weights of another fine-tune from `path`, a safetensors file with the model's whole state. `packaged` are
// the package's weights, used for constants of the code and compared with weights that are built into it. What sessions
// begin with, `initial`, may be among the given. WeightsError: the file does not exist, does not fit, or has other
// state.
Weights replaced_weights(const Manifest& manifest, const Target& target, const Weights& packaged,
                         const InitialState& initial, const std::string& path);

}  // namespace exportkit
