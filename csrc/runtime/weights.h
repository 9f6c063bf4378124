// Weights outside of the compiled code: mapped from the package, or given in their place.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "package/mapping.h"
#include "package/reader.h"
#include "runtime/session.h"

namespace exportkit {

using Weights = std::map<std::string, at::Tensor>;  // by the weights' names in the manifest

class MappedWeights {
 public:
  // Those of a package, as package/mapping.h has them, with its errors.
  explicit MappedWeights(const PackageReader& reader);

  // Those with a record. The tensors may not be written to, nor outlive this.
  const Weights& tensors() const { return tensors_; }

 private:
  WeightMapping mapping_;
  Weights tensors_;
};

// What a target's code takes from outside.
Constants constants_of(const Target& target, const Weights& weights);

// The weights of another fine-tune, in memory of their own, in the place of those that the model has. `packaged` are
// the package's, for what stays: constants of the code, and weights that are built into it. `path` is a safetensors
// file of all of the model's state. WeightsError: there is no such file, or it does not fit.
Weights replaced_weights(const Manifest& manifest, const Target& target, const Weights& packaged,
                         const std::string& path);

}  // namespace exportkit
