// Files of a session's state.
#include <stdexcept>
#include <system_error>

#include "package/errors.h"
#include "package/safetensors.h"
#include "package/state_matching.h"
#include "package/text.h"
#include "runtime/inputs.h"
#include "runtime/state.h"
#include "runtime/tensors.h"

namespace exportkit {
namespace {

using safetensors::Place;

constexpr mode_t kMode = 0600;  // what a model remembers may be private

// Throws StateError if the file has the state of another model.
void check_owner(const safetensors::Metadata& metadata, const Manifest& manifest, const std::string& path) {
  const auto model = metadata.find(kStateFileModel), digest = metadata.find(kStateFileDigest);
  if (model == metadata.end() || digest == metadata.end()) {
    throw Error(errors::kState, path + " does not say which model's state it has",
                "Give a file that a session's save wrote.");
  }
  if (model->second != manifest.name) {
    throw Error(errors::kState,
                path + " has the state of the model " + shown(model->second) + "; this is " + manifest.name);
  }
  if (digest->second != state_digest(manifest)) {
    throw Error(errors::kState,
                path + " has the state of another " + manifest.name + ": the names, dtypes or shapes differ",
                "Load it with the package whose session saved it.");
  }
}

// Throws StateError if the file's tensors are not those of the state.
std::vector<const Place*> matched(const std::vector<Place>& places, const Manifest& manifest,
                                  const std::vector<at::Tensor>& like, const std::string& path) {
  std::map<std::string, const Place*> given;
  for (const Place& place : places) given.emplace(place.name, &place);
  std::vector<const Place*> found;
  for (size_t i = 0; i < like.size(); ++i) {
    const StateTensor& state = manifest.state[i];
    const auto node = given.extract(state.name);
    if (node.empty()) throw Error(errors::kState, path + " has no tensor " + state.name);
    const Place& place = *node.mapped();
    if (place.dtype != state.dtype || !like[i].sizes().equals(place.shape)) {
      throw Error(errors::kState,
                  path + ": " + state.name + " is " + place.dtype + shape_text(place.shape) + "; the session's is " +
                      describe(like[i]),
                  "A session takes the state of one with the same sizes.");
    }
    found.push_back(&place);
  }
  if (!given.empty()) {
    throw Error(errors::kState, path + " has the tensor " + shown(given.begin()->first) +
                                    ", which is not in the state of " + manifest.name);
  }
  return found;
}

}  // namespace

void save_state(const Manifest& manifest, const std::vector<at::Tensor>& state, const std::string& path) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (size_t i = 0; i < state.size(); ++i) named.emplace_back(manifest.state[i].name, state[i]);
  try {
    write_tensors(path, kMode, named, {{kStateFileModel, manifest.name}, {kStateFileDigest, state_digest(manifest)}});
  } catch (const std::system_error& error) {
    throw Error(errors::kState, "cannot write the state to " + path + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {  // such as a dtype that the format lacks
    throw Error(errors::kState, "the state cannot be saved: " + std::string(error.what()));
  }
}

std::vector<at::Tensor> read_state(const Manifest& manifest, const std::vector<at::Tensor>& like,
                                   const std::string& path) {
  try {
    const SafetensorsFile file(path);
    check_owner(file.metadata(), manifest, path);
    std::vector<at::Tensor> state;
    for (const Place* place : matched(file.places(), manifest, like, path)) state.push_back(file.read(*place));
    return state;
  } catch (const std::system_error& error) {
    throw Error(errors::kState, "cannot read the state " + path + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kState, path + " is not a safetensors file: " + error.what());
  }
}

}  // namespace exportkit
