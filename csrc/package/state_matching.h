// A model's state: which of a file's tensors are its weights, and how a file names the model whose state it has.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "package/manifest.h"
#include "package/safetensors.h"

namespace exportkit {

// Finds every weight of the state_dict among a file's tensors. A tied weight may have any of its names. Tensors of
// sessions' state may be there, and are left out.
//
// Returns the tensors of each weight, at least one. WeightsError lists all tensors that are missing, unknown to the
// model, or of another dtype or shape.
std::map<std::string, std::vector<const safetensors::Place*>> match_state(const std::vector<Weight>& weights,
                                                                          const std::vector<StateTensor>& state,
                                                                          const std::vector<safetensors::Place>& given);

// The metadata of a state file (safetensors): the model's name and `state_digest`.
inline constexpr const char* kStateFileModel = "exportkit.model";
inline constexpr const char* kStateFileDigest = "exportkit.state";

// The SHA-256 of the name, dtype and shape of every tensor of the state, in order. What the state begins with is no
// part of it: another fine-tune of the model takes the same state.
std::string state_digest(const Manifest& manifest);

}  // namespace exportkit
