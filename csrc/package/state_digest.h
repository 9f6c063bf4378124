// Names the state of a model, so that a file of one model's state is not loaded into another's.
#pragma once

#include <string>

#include "package/manifest.h"

namespace exportkit {

// The metadata of a state file (safetensors): the model's name and `state_digest`.
inline constexpr const char* kStateFileModel = "exportkit.model";
inline constexpr const char* kStateFileDigest = "exportkit.state";

// The SHA-256 of the name, dtype and shape of every tensor of the state, in order. What the state begins with is no
// part of it: another fine-tune of the model takes the same state.
std::string state_digest(const Manifest& manifest);

}  // namespace exportkit
