// Weights on the device where the compiled code runs.
#pragma once

#include <c10/core/Device.h>

#include "package/manifest.h"
#include "runtime/weights.h"

namespace exportkit {

// The weights that a target's methods take, on a device. On the CPU these are the tensors that were given. Elsewhere
// they are copies in one piece of memory, made one after another: what reads `weights` needs memory for one of them.
// All methods and runners share the copy; it is given back with its last tensor, when the device must have finished.
Weights on_device(const Target& target, const Weights& weights, c10::Device device);

}  // namespace exportkit
