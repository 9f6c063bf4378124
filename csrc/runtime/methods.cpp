#include "runtime/methods.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

std::vector<DimensionRange> dimensions_of(const Call& call) {
  std::vector<DimensionRange> dimensions;
  for (const Dimension& dimension : call.dimensions) {
    dimensions.push_back({dimension.name, dimension.min, dimension.max});
  }
  return dimensions;
}

std::vector<SizeRange> ranges_of(const std::vector<Extent>& shape, const std::vector<DimensionRange>& dimensions) {
  std::vector<SizeRange> ranges;
  for (const Extent& extent : shape) {
    SizeRange& range = ranges.emplace_back(SizeRange{0, INT64_MAX, 1, "?"});
    if (const auto* fixed = std::get_if<int64_t>(&extent)) range = {*fixed, *fixed, 1, std::to_string(*fixed)};
    const Size* const size = size_of(extent);
    for (size_t i = 0; size != nullptr && i < dimensions.size(); ++i) {
      if (dimensions[i].name != size->dimension) continue;
      const int64_t least = size_at(*size, dimensions[i].min), greatest = size_at(*size, dimensions[i].max);
      range = {least, greatest, size->scale, expression(*size), i, size->scale, size->offset};
    }
  }
  return ranges;
}

// Why a tensor does not consist of one row for each number of the dimension `rows`; empty if it does.
std::string why_not(const std::string& what, const std::vector<Extent>& shape, const std::string& rows,
                    const char* whose) {
  const Size* const first = shape.empty() ? nullptr : size_of(shape.front());
  if (first == nullptr || first->dimension != rows || first->scale != 1 || first->offset != 0) {
    return "the first size of " + what + " is not " + rows + ", so its rows are not the " + whose + "'";
  }
  for (size_t axis = 1; axis < shape.size(); ++axis) {
    const Size* const size = size_of(shape[axis]);
    if (size == nullptr || size->dimension != rows) continue;
    return "the size of " + what + " in dimension " + std::to_string(axis) + " depends on " + rows + " as well";
  }
  return {};
}

// The same for the inputs and outputs of a call.
std::string why_not(const Call& call, const std::string& rows) {
  std::string reason;
  const auto look = [&](const auto& tensors) {
    for (const auto& each : tensors) {
      if (reason.empty()) reason = why_not("`" + each.name + "`", each.shape, rows, "requests");
    }
  };
  look(call.inputs), look(call.outputs);
  return reason;
}

// The same for the state of a method.
std::string why_not(const Manifest& manifest, const Method& method, const std::string& rows) {
  if (method.state.empty()) return {};
  const auto of_state = state_dimensions(manifest);
  if (of_state.size() != 1 || of_state.front().name != rows) return "the size of the state is not " + rows + " alone";
  for (const StateUse& use : method.state) {
    const StateTensor& state = manifest.state.at(static_cast<size_t>(use.index));
    auto reason = why_not("the state `" + state.name + "`", state.shape, rows, "sequences");
    if (!reason.empty()) return reason;
  }
  return {};
}

// The dimension that is the first size of every input, every output and all state of a method, and no other size, as an
// index of its dimensions; or why there is none.
std::pair<std::optional<size_t>, std::string> row_rule(const Manifest& manifest, const Method& method) {
  const Call& call = method.call;
  if (call.inputs.empty() || call.outputs.empty()) return {{}, "the model has no inputs or no outputs"};
  const TensorInput& input = call.inputs.front();
  const Size* const first = input.shape.empty() ? nullptr : size_of(input.shape.front());
  if (first == nullptr) return {{}, "the first size of input `" + input.name + "` does not vary"};
  if (auto reason = why_not(call, first->dimension); !reason.empty()) return {{}, reason};
  const auto rows = std::ranges::find(call.dimensions, first->dimension, &Dimension::name);
  if (rows->max / 2 < std::max<int64_t>(rows->min, 1)) {
    return {{},
            rows->name + " is from " + std::to_string(rows->min) + " to " + std::to_string(rows->max) +
                ", which leaves no room for two requests"};
  }
  if (auto reason = why_not(manifest, method, rows->name); !reason.empty()) return {{}, reason};
  return {static_cast<size_t>(rows - call.dimensions.begin()), {}};
}

MethodInfo describe(const Manifest& manifest, const Method& method) {
  MethodInfo info{method.name, {}, {}, dimensions_of(method.call), !method.state.empty(), {}, {}, {}, {}};
  for (const TensorInput& input : method.call.inputs) {
    info.inputs.push_back(
        {input.name, input.dtype, ranges_of(input.shape, info.dimensions), input.written.has_value()});
  }
  for (const TensorOutput& output : method.call.outputs) {
    info.outputs.push_back({output.name, output.dtype, ranges_of(output.shape, info.dimensions)});
  }
  for (const StateUse& use : method.state) {
    info.state.push_back(static_cast<size_t>(use.index));
    info.state_written.push_back(use.written);
  }
  std::tie(info.row_dimension, info.row_reason) = row_rule(manifest, method);
  return info;
}

}  // namespace

std::vector<MethodInfo> describe_methods(const Manifest& manifest) {
  std::vector<MethodInfo> described;
  for (const Method& method : manifest.methods) described.push_back(describe(manifest, method));
  return described;
}

std::vector<TensorInfo> describe_state(const Manifest& manifest) {
  const std::vector<DimensionRange> dimensions = state_dimensions(manifest);
  std::vector<TensorInfo> described;
  for (const StateTensor& state : manifest.state) {
    described.push_back({state.name, state.dtype, ranges_of(state.shape, dimensions)});
  }
  return described;
}

std::vector<DimensionRange> state_dimensions(const Manifest& manifest) {
  std::vector<DimensionRange> found;
  for (size_t i = 0; i < manifest.state.size(); ++i) {
    const Size* const rows = rows_of(manifest.state[i]);
    if (rows == nullptr || std::ranges::find(found, rows->dimension, &DimensionRange::name) != found.end()) continue;
    // The reader has checked that a method uses the tensor, and that all that do agree on its dimension.
    const auto uses_it = [&](const Method& method) {
      return std::ranges::find(method.state, static_cast<int64_t>(i), &StateUse::index) != method.state.end();
    };
    const Call& call = std::ranges::find_if(manifest.methods, uses_it)->call;
    const Dimension& dimension = *std::ranges::find(call.dimensions, rows->dimension, &Dimension::name);
    found.push_back({dimension.name, dimension.min, dimension.max});
  }
  return found;
}

void check_sizes(const std::vector<DimensionRange>& dimensions, const Sizes& given, const std::string& whose) {
  std::set<std::string> known;
  for (const DimensionRange& dimension : dimensions) {
    known.insert(dimension.name);
    const auto size = given.find(dimension.name);
    if (size != given.end() && dimension.min <= size->second && size->second <= dimension.max) continue;
    throw Error(errors::kUsage, concat(dimension.name, " must be from ", dimension.min, " to ", dimension.max, ", got ",
                                       (size == given.end() ? "nothing" : std::to_string(size->second))));
  }
  for (const auto& [name, size] : given) {
    if (!known.contains(name)) throw Error(errors::kUsage, whose + " has no dimension " + name);
  }
}

std::vector<at::Tensor> inputs_of(const Call& call, const Sizes& sizes, at::Device device) {
  std::vector<at::Tensor> inputs;
  for (const TensorInput& input : call.inputs) {
    const auto options = at::TensorOptions(dtype_of(input.dtype)).device(device);
    inputs.push_back(at::empty(shape_at(input.shape, sizes), options));
  }
  return inputs;
}

}  // namespace exportkit
