// Weights outside the compiled code, mapped from the package or replaced by given ones, on the device where it runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <map>
#include <string>
#include <vector>

#include "package/manifest.h"
#include "package/mapping.h"
#include "package/reader.h"
#include "runtime/code.h"
#include "runtime/state.h"

namespace exportkit {

using Weights = std::map<std::string, at::Tensor>;  // by the weights' names in the manifest

struct MappedWeights {
  // Maps a package's weights. package/mapping.h has the rules and errors.
  explicit MappedWeights(const PackageReader& reader);

  WeightMapping mapping;
  Weights tensors;  // with a record. Do not write to them. They must not outlive this object.
};

// The bytes of the weights that a target's code takes from outside, or has inside if it takes none.
uint64_t weight_bytes_of(const Manifest& manifest, const Target& target);

// The tensors that the code of a method takes from outside.
Constants constants_of(const Target& target, const std::string& method, const Weights& weights);

// Copies the weights of another fine-tune from `path`, a safetensors file with the model's whole state. `packaged` are
// the package's weights, used for constants of the code and compared with weights that are built into it. What sessions
// begin with, `initial`, may be among the given. WeightsError: the file does not exist, does not fit, or has other
// state.
Weights replaced_weights(const Manifest& manifest, const Target& target, const Weights& packaged,
                         const InitialState& initial, const std::string& path);

// Copies weights, which are dense and on the CPU, to one piece of a device's memory, with their strides. Any stream may
// read the copies at once.
std::vector<at::Tensor> copied_together(const std::vector<at::Tensor>& weights, c10::Device device);

// The weights that a target's methods take, on a device. On the CPU these are the tensors that were given. Elsewhere
// they are copies, which all methods and runners share; their memory is given back with the last of them, when the
// device must have finished.
Weights on_device(const Target& target, const Weights& weights, c10::Device device);

}  // namespace exportkit
