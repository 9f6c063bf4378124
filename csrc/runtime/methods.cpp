#include "runtime/methods.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

using Ranges = std::map<std::string, DimensionRange>;
using Dimensions = std::vector<DimensionRange>;

Dimensions dimensions_of(const Call& call) {
  Dimensions dimensions;
  for (const Dimension& dimension : call.dimensions) {
    dimensions.push_back({dimension.name, dimension.min, dimension.max});
  }
  return dimensions;
}

Ranges ranges_of(const Call& call) {
  Ranges ranges;
  for (const DimensionRange& dimension : dimensions_of(call)) ranges.emplace(dimension.name, dimension);
  return ranges;
}

SizeRange range_of(const Dimensions& dimensions, const Extent& extent) {
  if (const auto* fixed = std::get_if<int64_t>(&extent)) return {*fixed, *fixed, 1, std::to_string(*fixed)};
  const auto& size = std::get<Size>(extent);
  for (size_t i = 0; i < dimensions.size(); ++i) {
    const DimensionRange& known = dimensions[i];
    if (known.name != size.dimension) continue;
    return {
        size_at(size, known.min), size_at(size, known.max), size.scale, expression(size), i, size.scale, size.offset};
  }
  return {0, INT64_MAX, 1, "?"};
}

using Extents = std::vector<std::optional<Extent>>;

const Size* size_of(const std::optional<Extent>& extent) { return extent ? std::get_if<Size>(&*extent) : nullptr; }

// Why a tensor does not consist of one row for each number of the dimension `rows`; empty if it does.
std::string why_not(const std::string& what, const Extents& shape, const std::string& rows, const char* whose) {
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

Extents extents(const std::vector<Extent>& shape) { return {shape.begin(), shape.end()}; }

std::string why_not(const Call& call, const std::string& rows) {
  for (const TensorInput& input : call.inputs) {
    if (auto reason = why_not("`" + input.name + "`", extents(input.shape), rows, "requests"); !reason.empty()) {
      return reason;
    }
  }
  for (const TensorOutput& output : call.outputs) {
    if (auto reason = why_not("`" + output.name + "`", output.shape, rows, "requests"); !reason.empty()) return reason;
  }
  return {};
}

std::string why_not(const Manifest& manifest, const Method& method, const std::string& rows) {
  if (method.state.empty()) return {};
  const auto of_state = state_dimensions(manifest);
  if (of_state.size() != 1 || of_state.front().name != rows) return "the size of the state is not " + rows + " alone";
  for (const StateUse& use : method.state) {
    const StateTensor& state = manifest.state.at(static_cast<size_t>(use.index));
    auto reason = why_not("the state `" + state.name + "`", extents(state.shape), rows, "sequences");
    if (!reason.empty()) return reason;
  }
  return {};
}

// The dimension that is the first size of every input, every output and all state of a method, and no other size, as an
// index of its dimensions; or why there is none.
struct RowRule {
  std::optional<size_t> dimension;
  std::string reason;
};

RowRule row_rule(const Manifest& manifest, const Method& method) {
  const Call& call = method.call;
  if (call.inputs.empty() || call.outputs.empty()) return {{}, "the model has no inputs or no outputs"};
  const TensorInput& input = call.inputs.front();
  const Size* const first = input.shape.empty() ? nullptr : std::get_if<Size>(&input.shape.front());
  if (first == nullptr) return {{}, "the first size of input `" + input.name + "` does not vary"};
  if (auto reason = why_not(call, first->dimension); !reason.empty()) return {{}, reason};
  const auto rows = std::find_if(call.dimensions.begin(), call.dimensions.end(),
                                 [&](const Dimension& dimension) { return dimension.name == first->dimension; });
  if (rows->max / 2 < std::max<int64_t>(rows->min, 1)) {
    return {{},
            rows->name + " is from " + std::to_string(rows->min) + " to " + std::to_string(rows->max) +
                ", which leaves no room for two requests"};
  }
  if (auto reason = why_not(manifest, method, rows->name); !reason.empty()) return {{}, reason};
  return {static_cast<size_t>(rows - call.dimensions.begin()), {}};
}

MethodInfo describe(const Manifest& manifest, const Method& method) {
  const Dimensions dimensions = dimensions_of(method.call);
  MethodInfo info{method.name, {}, {}, dimensions, !method.state.empty(), {}, {}, {}, {}};
  for (const TensorInput& input : method.call.inputs) {
    TensorInfo& tensor = info.inputs.emplace_back(TensorInfo{input.name, input.dtype, {}, input.written.has_value()});
    for (const Extent& extent : input.shape) tensor.shape.push_back(range_of(dimensions, extent));
  }
  for (const TensorOutput& output : method.call.outputs) {
    TensorInfo& tensor = info.outputs.emplace_back(TensorInfo{output.name, output.dtype, {}});
    for (const auto& extent : output.shape) {
      tensor.shape.push_back(extent ? range_of(dimensions, *extent) : SizeRange{0, INT64_MAX, 1, "?"});
    }
  }
  for (const StateUse& use : method.state) {
    info.state.push_back(static_cast<size_t>(use.index));
    info.state_written.push_back(use.written);
  }
  const RowRule rows = row_rule(manifest, method);
  info.row_dimension = rows.dimension, info.row_reason = rows.reason;
  return info;
}

// By dimension of the state, the numbers that all methods take which use the state with it.
Ranges state_ranges(const Manifest& manifest) {
  Ranges ranges;
  for (const Method& method : manifest.methods) {
    const Ranges of_method = ranges_of(method.call);
    for (const StateUse& use : method.state) {
      for (const Extent& extent : manifest.state.at(static_cast<size_t>(use.index)).shape) {
        const auto* size = std::get_if<Size>(&extent);
        if (size == nullptr) continue;
        const DimensionRange& range = of_method.at(size->dimension);
        DimensionRange& known = ranges.try_emplace(size->dimension, range).first->second;
        known.min = std::max(known.min, range.min), known.max = std::min(known.max, range.max);
      }
    }
  }
  return ranges;
}

}  // namespace

std::map<std::string_view, const Method*> by_name(const std::vector<Method>& methods) {
  std::map<std::string_view, const Method*> named;
  for (const Method& method : methods) named.emplace(method.name, &method);
  return named;
}

std::vector<MethodInfo> describe_methods(const Manifest& manifest) {
  std::vector<MethodInfo> described;
  for (const Method& method : manifest.methods) described.push_back(describe(manifest, method));
  return described;
}

std::vector<TensorInfo> describe_state(const Manifest& manifest) {
  const Dimensions dimensions = state_dimensions(manifest);
  std::vector<TensorInfo> described;
  for (const StateTensor& state : manifest.state) {
    TensorInfo& tensor = described.emplace_back(TensorInfo{state.name, state.dtype, {}});
    for (const Extent& extent : state.shape) tensor.shape.push_back(range_of(dimensions, extent));
  }
  return described;
}

std::vector<DimensionRange> state_dimensions(const Manifest& manifest) {
  const Ranges ranges = state_ranges(manifest);
  std::vector<DimensionRange> dimensions;
  std::set<std::string> seen;
  for (const StateTensor& state : manifest.state) {
    for (const Extent& extent : state.shape) {
      const auto* size = std::get_if<Size>(&extent);
      if (size != nullptr && seen.insert(size->dimension).second) dimensions.push_back(ranges.at(size->dimension));
    }
  }
  return dimensions;
}

std::string names_of(const std::vector<MethodInfo>& methods) {
  std::string names;
  for (const MethodInfo& method : methods) names += (names.empty() ? "" : ", ") + method.name;
  return names;
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

std::vector<int64_t> shape_at(const std::vector<Extent>& shape, const Sizes& sizes) {
  std::vector<int64_t> found;
  for (const Extent& extent : shape) {
    const auto* size = std::get_if<Size>(&extent);
    found.push_back(size == nullptr ? std::get<int64_t>(extent) : size_at(*size, sizes.at(size->dimension)));
  }
  return found;
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
