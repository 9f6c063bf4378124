#include "runtime/state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <variant>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/inputs.h"

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

}  // namespace exportkit
