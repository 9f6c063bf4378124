#include "runtime/rows.h"

#include <algorithm>
#include <vector>

#include "runtime/methods.h"

namespace exportkit {
namespace {

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

}  // namespace

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

}  // namespace exportkit
