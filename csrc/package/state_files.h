// Files of a session's state: which of a file's tensors set which tensors of the state. Works without torch.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "package/manifest.h"
#include "package/safetensors.h"

namespace exportkit {

// The metadata of a file that a session saved (safetensors): the model's name and `state_digest`.
inline constexpr const char* kStateFileModel = "exportkit.model";
inline constexpr const char* kStateFileDigest = "exportkit.state";

// The SHA-256 of the name, dtype and shape of every tensor of the state, in order. What the state begins with is no
// part of it: another fine-tune of the model takes the same state.
std::string state_digest(const Manifest& manifest);

struct StateFile {
  std::string path;
  safetensors::Metadata metadata;
  std::vector<safetensors::Place> places;
};

// A value for a tensor of the state.
struct StateValue {
  size_t index;                    // of the manifest's state
  const safetensors::Place* from;  // of the StateFile; null: zeros
  double scale;                    // the file's numbers are multiplied with it
  std::vector<int64_t> shape;  // of the value: with zeros behind the file's numbers; without rows, it is every row's
};

// The values of the whole state, in order, from a file that a session with these numbers of rows saved. StateError: it
// is another model's, or of other sizes.
std::vector<StateValue> match_whole_state(const Manifest& manifest, const std::map<std::string, int64_t>& sizes,
                                          const StateFile& file);

// The values that a file has for a part of the state.
//
// A tensor has the state's name, or the end of it after a dot; PEFT's `base_model.model.` is left out. It may lack the
// rows. Tensors of LoRA (`<module>.lora_A.weight`, [rank, ...], and `lora_B`, [out, rank, ...]) may have a smaller rank
// and another floating dtype. If the file has some, the state's others become zeros: an adapter takes the place of the
// one before. PEFT's adapter_config.json beside the file has their scale. A session's own file needs none.
//
// With `one_row`, they are values of one row, and each tensor of the state must have rows.
//
// Throws StateError if the file has no tensors, if one of them matches none or several of the state's, or if the
// configuration cannot be read or describes more than LoRA.
std::vector<StateValue> match_part_of_state(const Manifest& manifest, const std::map<std::string, int64_t>& sizes,
                                            const StateFile& file, bool one_row);

// Finds every weight of the state_dict among a file's tensors. A tied weight may have any of its names. Tensors of
// sessions' state may be there, and are left out.
//
// Returns the tensors of each weight, at least one. WeightsError lists all tensors that are missing, unknown to the
// model, or of another dtype or shape.
std::map<std::string, std::vector<const safetensors::Place*>> match_state(const std::vector<Weight>& weights,
                                                                          const std::vector<StateTensor>& state,
                                                                          const std::vector<safetensors::Place>& given);

}  // namespace exportkit
