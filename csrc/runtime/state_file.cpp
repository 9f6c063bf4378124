// Files of a session's state.
#include <ATen/ops/zeros.h>

#include <stdexcept>
#include <system_error>

#include "package/errors.h"
#include "package/state_files.h"
#include "runtime/inputs.h"
#include "runtime/state.h"
#include "runtime/tensors.h"

namespace exportkit {
namespace {

constexpr mode_t kMode = 0600;  // what a model remembers may be private

// The file's numbers, scaled, in the state's dtype, with zeros behind them.
at::Tensor value_of(const SafetensorsFile& file, const StateValue& value, const std::string& dtype) {
  if (value.from != nullptr && value.from->shape == value.shape && value.from->dtype == dtype && value.scale == 1) {
    return file.read(*value.from);
  }
  at::Tensor whole = at::zeros(value.shape, dtype_of(dtype));
  if (value.from == nullptr) return whole;
  at::Tensor place = whole;
  for (size_t axis = 0; axis < value.shape.size(); ++axis) {
    place = place.narrow(static_cast<int64_t>(axis), 0, value.from->shape[axis]);
  }
  const at::Tensor read = file.read(*value.from);
  const at::ScalarType wide = c10::promoteTypes(read.scalar_type(), at::kFloat);
  place.copy_(value.scale == 1 ? read : read.to(wide).mul(value.scale));
  return whole;
}

// Reads what `match` finds for a part of the state or all of it.
template <class Match>
StateTensors read_matched(const Manifest& manifest, const std::string& path, const Match& match) {
  try {
    const SafetensorsFile file(path);
    const StateFile given{path, file.metadata(), file.places()};  // which the values point into
    StateTensors tensors;
    for (const StateValue& value : match(given)) {
      tensors.emplace_back(value.index, value_of(file, value, manifest.state[value.index].dtype));
    }
    return tensors;
  } catch (const std::system_error& error) {
    throw Error(errors::kState, "cannot read the state " + path + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kState, path + " is not a safetensors file: " + error.what());
  }
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

StateTensors read_state(const Manifest& manifest, const Sizes& sizes, const std::string& path) {
  return read_matched(manifest, path, [&](const StateFile& file) { return match_whole_state(manifest, sizes, file); });
}

StateTensors read_part_of_state(const Manifest& manifest, const Sizes& sizes, const std::string& path, bool one_row) {
  return read_matched(manifest, path,
                      [&](const StateFile& file) { return match_part_of_state(manifest, sizes, file, one_row); });
}

}  // namespace exportkit
