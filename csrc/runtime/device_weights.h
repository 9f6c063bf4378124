// Weights on the device where the compiled code runs.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "package/manifest.h"
#include "runtime/weights.h"

namespace exportkit {

// Copies weights, which are dense and on the CPU, to one piece of a device's memory, with their strides. Any stream may
// read the copies at once.
std::vector<at::Tensor> copied_together(const std::vector<at::Tensor>& weights, c10::Device device);

// The weights that a target's methods take, on a device. On the CPU these are the tensors that were given. Elsewhere
// they are copies, which all methods and runners share; their memory is given back with the last of them, when the
// device must have finished.
Weights on_device(const Target& target, const Weights& weights, c10::Device device);

}  // namespace exportkit
