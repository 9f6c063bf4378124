#include "runtime/state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <variant>

#include "package/errors.h"
#include "package/state_files.h"
#include "package/text.h"
#include "runtime/inputs.h"
#include "runtime/tensors.h"

namespace exportkit {
namespace {

// The shape of the elements in the package: one row where a size is a dimension.
std::vector<int64_t> recorded_shape(const StateTensor& state) {
  std::vector<int64_t> shape;
  for (const Extent& extent : state.shape) {
    const auto* fixed = std::get_if<int64_t>(&extent);
    shape.push_back(fixed == nullptr ? 1 : *fixed);
  }
  return shape;
}

at::Tensor read_first(const PackageReader& reader, const StateTensor& state) {
  at::Tensor first = at::empty(recorded_shape(state), dtype_of(state.dtype));
  if (const int64_t size = reader.record(*state.initial).size; static_cast<uint64_t>(size) != first.nbytes()) {
    throw Error(errors::kManifestConsistency, *state.initial + " has " + std::to_string(size) + " bytes; the state " +
                                                  state.name + " needs " + std::to_string(first.nbytes()));
  }
  reader.read(*state.initial, static_cast<char*>(first.mutable_data_ptr()));
  return first;
}

bool is_fixed(const StateTensor& state) {
  return std::ranges::all_of(state.shape, [](const Extent& extent) { return std::holds_alternative<int64_t>(extent); });
}

// What every method with state writes.
std::set<size_t> always_written(const Manifest& manifest) {
  std::set<size_t> always;
  for (size_t i = 0; i < manifest.state.size(); ++i) {
    const auto writes = [&](const StateUse& use) { return use.written && static_cast<size_t>(use.index) == i; };
    const auto does = [&](const Method& method) {
      return method.state.empty() || std::ranges::any_of(method.state, writes);
    };
    if (std::ranges::all_of(manifest.methods, does)) always.insert(i);
  }
  return always;
}

// Runs `make`, which allocates a state.
template <class Make>
auto with_room(const Make& make) {
  try {
    return make();
  } catch (const c10::Error& error) {
    throw Error(errors::kModelRun,
                "the state of a session cannot be made: " + first_line(error.what_without_backtrace()),
                "Close other sessions, or make one of smaller sizes.");
  }
}

// --- files -----------------------------------------------------------------------------------------------------------

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
  return read_file({errors::kState, errors::kState}, "the state ", path, [&](const SafetensorsFile& file) {
    const StateFile given{path, file.metadata, file.places};  // which the values point into
    StateTensors tensors;
    for (const StateValue& value : match(given)) {
      tensors.emplace_back(value.index, value_of(file, value, manifest.state[value.index].dtype));
    }
    return tensors;
  });
}

}  // namespace

InitialState::InitialState(const PackageReader& reader, c10::Device device)
    : described_(reader.manifest().state), device_(device) {
  for (const StateTensor& state : described_) {
    first_.push_back(state.initial ? std::optional(read_first(reader, state).to(device)) : std::nullopt);
  }
  const std::set<size_t> always = always_written(reader.manifest());
  for (size_t i = 0; i < described_.size(); ++i) {
    if (is_fixed(described_[i]) && !always.contains(i)) lazy_.insert(i);
  }
}

std::vector<at::Tensor> InitialState::make(const Sizes& sizes) const {
  return with_room([&] {
    std::vector<at::Tensor> state;
    for (size_t i = 0; i < described_.size(); ++i) {
      const auto options = at::TensorOptions(dtype_of(described_[i].dtype)).device(device_);
      const std::vector<int64_t> shape = shape_at(described_[i].shape, sizes);
      if (!lazy_.contains(i)) {
        state.push_back(at::empty(shape, options));
      } else {
        state.push_back(first_[i] ? *first_[i] : at::zeros({}, options).expand(shape));
      }
    }
    restore(state, lazy_);
    return state;
  });
}

void InitialState::restore(const std::vector<at::Tensor>& state, const std::set<size_t>& shared) const {
  for (size_t i = 0; i < state.size(); ++i) {
    if (shared.contains(i)) continue;
    if (first_[i]) {
      state[i].copy_(first_[i]->expand(state[i].sizes()));
    } else {
      state[i].zero_();
    }
  }
}

bool InitialState::begins_with(size_t index, const at::Tensor& given) const {
  const StateTensor& described = described_[index];
  if (given.scalar_type() != dtype_of(described.dtype)) return false;
  if (given.sizes().size() != described.shape.size()) return false;
  for (size_t axis = 0; axis < described.shape.size(); ++axis) {
    const auto* fixed = std::get_if<int64_t>(&described.shape[axis]);
    if (fixed != nullptr && *fixed != given.size(static_cast<int64_t>(axis))) return false;
  }
  const std::optional<at::Tensor>& first = first_[index];
  return same_content(given, first ? first->cpu().expand(given.sizes()) : at::zeros_like(given));
}

bool same_content(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor left = one.contiguous(), right = other.contiguous();
  return left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& state, const std::set<size_t>& shared) {
  return with_room([&] {
    std::vector<at::Tensor> copies;
    for (size_t i = 0; i < state.size(); ++i) {
      const at::Tensor& own = state[i];
      copies.push_back(shared.contains(i) ? own : at::empty(own.sizes(), own.options()).copy_(own));
    }
    return copies;
  });
}

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
