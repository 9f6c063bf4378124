// Which tensors of another fine-tune are taken for which weights.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "package/manifest.h"
#include "package/safetensors.h"

namespace exportkit {

// Finds every weight of the state among the tensors of a file. A tied weight may be there under any of its names.
//
// By weight, where it is given, at least once. WeightsError: some are missing, are not of the model, or have another
// dtype or shape; the message has them all.
std::map<std::string, std::vector<const safetensors::Place*>> match_state(const std::vector<Weight>& weights,
                                                                          const std::vector<safetensors::Place>& given);

}  // namespace exportkit
