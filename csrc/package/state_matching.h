// A model's state_dict: which of a file's tensors are its weights.
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

// Such as "float32[2, 3]".
std::string kind(const std::string& dtype, const std::vector<int64_t>& shape);

}  // namespace exportkit
