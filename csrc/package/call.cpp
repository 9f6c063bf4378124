#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "package/consistency.h"
#include "package/manifest_checks.h"

namespace exportkit {

namespace {

constexpr int64_t kMaxSize = int64_t{1} << 62;
constexpr int kMaxStructureDepth = 32;  // of containers within containers

// --- structures ----------------------------------------------------------------------------------------------------

void check_named_tuple(const Node& node, const std::string& what) {
  const auto check = [&](const std::string& name) {
    require(is_name(name), what, ": ", Quoted{name}, " is not allowed as the name of a named tuple or a field");
  };
  check(node.class_name);
  for (const std::string& name : node.keys) {
    check(name);
    require(name[0] != '_', what, ": a named tuple's field cannot start with an underscore");
  }
}

// Checks that every container can be built and that the tensors are numbered in order from `next`.
void check_node(const Node& node, const std::string& what, int64_t& next, int depth = 0) {
  require(depth <= kMaxStructureDepth, "the ", what, " are nested deeper than ", kMaxStructureDepth, " containers");
  if (node.type == "tensor") {
    require(node.index == next, "the structure of the ", what, " has tensor ", node.index,
            " where it should have tensor ", next);
    ++next;
  }
  distinct(node.keys, kItself, "key of the ", what);
  require(node.type == "sequence" || node.keys.size() == node.items.size(), what, ": ", node.keys.size(), " keys for ",
          node.items.size(), " items");
  if (node.type == "namedtuple") check_named_tuple(node, what);
  for (const Node& item : node.items) check_node(item, what, next, depth + 1);
}

// Calls on_name for each tensor, in order. `path` is the node's path and is restored afterwards. Paths are not copied:
// a long key around many items would be copied for each item.
void for_each_leaf(const Node& node, std::string& path, const std::function<void(const std::string&)>& on_name) {
  if (node.type == "tensor") on_name(path.empty() ? "0" : path);
  const size_t length = path.size();
  for (size_t i = 0; i < node.items.size(); ++i) {
    if (length > 0) path += '.';
    path += node.type == "sequence" ? std::to_string(i) : node.keys[i];
    for_each_leaf(node.items[i], path, on_name);
    path.resize(length);
  }
}

// Checks that each tensor appears once in the structure, in order, and is named by its place there.
template <class Tensor>
void check_structure(std::vector<std::pair<std::string, const Node*>> nodes, const std::vector<Tensor>& tensors,
                     const std::string& what) {
  int64_t next = 0;
  for (const auto& [prefix, node] : nodes) check_node(*node, what, next);
  require(next == static_cast<int64_t>(tensors.size()), "the structure of the ", what, " has ", next,
          " tensors; the list has ", tensors.size());
  // Compares one name at a time: with long keys around many tensors, all names together may not fit in memory.
  size_t at = 0;
  for (auto& [prefix, node] : nodes) {
    for_each_leaf(*node, prefix, [&](const std::string& name) {
      const Tensor& tensor = tensors[at++];
      require(tensor.name == name, what, ": the tensor named ", Quoted{tensor.name}, " is at ", Quoted{name},
              " in the structure");
      require(item_bytes(tensor.dtype) > 0, what, ": ", Quoted{name}, " has the unknown dtype ", Quoted{tensor.dtype});
    });
  }
  distinct(tensors, kName, "tensor among the ", what);
}

// --- sizes ---------------------------------------------------------------------------------------------------------

// The least value of a size, whose dimension must be declared.
int64_t least_of(const Size& size, const std::string& tensor, const Dimensions& dimensions) {
  const auto found = dimensions.find(size.dimension);
  require(found != dimensions.end(), Quoted{tensor}, " has a size with dimension ", Quoted{size.dimension},
          ", which is not declared");
  const int64_t least = size_at(size, found->second->min);
  require(least >= 0 && size_at(size, found->second->max) <= kMaxSize, Quoted{tensor}, " has a size of ", size.scale,
          "*", size.dimension, " and ", size.offset, ", which is negative or too large");
  return least;
}

// Checks that the sizes use declared dimensions and that the tensor can fit in memory.
template <class Tensor>
void check_shape(const Tensor& tensor, const Dimensions& dimensions) {
  require(tensor.shape.size() <= kMaxRank, Quoted{tensor.name}, " has ", tensor.shape.size(), " sizes; at most ",
          kMaxRank, " are allowed");
  std::vector<int64_t> least;
  for (const Extent& extent : tensor.shape) {
    const Size* size = size_of(extent);
    const auto* fixed = std::get_if<int64_t>(&extent);
    least.push_back(size ? least_of(*size, tensor.name, dimensions) : fixed ? *fixed : 0);  // 0 if it is unknown
  }
  require(capped_product(1, least) <= uint64_t{kMaxSize}, Quoted{tensor.name},
          " has more than 2^62 elements even at its smallest, which no memory holds");
}

void check_dimensions(const Call& call) {
  distinct(call.dimensions, kName, "dimension");
  for (const Dimension& dimension : call.dimensions) {
    require(dimension.min <= dimension.max, "dimension ", dimension.name, " has min ", dimension.min, " above max ",
            dimension.max);
    for (const int64_t value : dimension.tried) {
      require(dimension.min <= value && value <= dimension.max, "dimension ", dimension.name, " was tried at ", value,
              ", which is not in its range");
    }
  }
  const Dimensions dimensions = dimensions_of(call);
  Names used;
  for (const TensorInput& tensor : call.inputs) {
    check_shape(tensor, dimensions);
    for (const Extent& extent : tensor.shape) {
      if (const Size* size = size_of(extent)) used.insert(size->dimension);
    }
  }
  for (const TensorOutput& tensor : call.outputs) check_shape(tensor, dimensions);
  for (const Dimension& dimension : call.dimensions) {
    require(used.contains(dimension.name), "no input has dimension ", dimension.name, ", so nothing gives it a value");
  }
}

void check_finite(const OutputTolerance& tolerance, const std::string& what) {
  require(std::isfinite(tolerance.rtol) && std::isfinite(tolerance.atol), what, " has a tolerance that is not finite");
}

void check_gradient(const TensorOutput& output, const GradientOf& gradient, const Names& outputs, const Call& call) {
  const bool has_input = std::ranges::count(call.inputs, gradient.input, &TensorInput::name) > 0;
  require(gradient.output != output.name && outputs.contains(gradient.output) && has_input, "output ",
          Quoted{output.name}, " is the gradient of ", Quoted{gradient.output}, " with respect to ",
          Quoted{gradient.input}, ", which are not another output and an input");
  require(std::isfinite(gradient.scale) && gradient.scale != 0, "output ", Quoted{output.name},
          " is a gradient with a scale that is 0 or not finite");
}

const TensorOutput& output_named(const Call& call, const std::string& name) {
  return *std::ranges::find(call.outputs, name, &TensorOutput::name);
}

// Whether the sizes that are known on both sides are equal. Else, outputs could not be compared.
bool alike(std::span<const Extent> left, std::span<const Extent> right) {
  const auto unknown = [](const Extent& extent) { return std::holds_alternative<std::monostate>(extent); };
  return std::ranges::equal(left, right, [&](const Extent& one, const Extent& other) {
    return unknown(one) || unknown(other) || one == other;
  });
}

void check_ranking(const TensorOutput& indices, const TensorOutput& values) {
  auto around = values.shape, given = indices.shape;
  const auto rank = static_cast<int64_t>(around.size());
  int64_t dim = indices.tolerance.dim.value_or(-1);
  bool fits = -rank <= dim && dim < rank;
  if (fits) {
    dim += dim < 0 ? rank : 0;
    if (given.size() == around.size()) given.erase(given.begin() + dim);  // argmax may leave the dimension out
    around.erase(around.begin() + dim);
    fits = alike(given, around);
  }
  require(fits, "output ", Quoted{indices.name}, " cannot have indices of dimension ",
          indices.tolerance.dim.value_or(-1), " of ", Quoted{values.name}, ": their shapes do not fit");
}

void check_rows(const TensorOutput& rows, const TensorOutput& indices) {
  const size_t rank = indices.shape.size();
  require(rank > 0 && rank <= rows.shape.size() && alike(indices.shape, std::span(rows.shape).first(rank)), "output ",
          Quoted{rows.name}, " cannot have the rows of ", Quoted{indices.name}, ": their shapes do not fit");
}

void check_tolerance(const TensorOutput& output, const Names& outputs, const Call& call) {
  const OutputTolerance& tolerance = output.tolerance;
  check_finite(tolerance, "output " + shown(output.name));
  for (const auto& other : {tolerance.ranking_of, tolerance.rows_of}) {
    if (!other) continue;
    require(*other != output.name && outputs.contains(*other), "output ", Quoted{output.name}, " refers to ",
            Quoted{*other}, ", which is not another output");
  }
  require(tolerance.ranking_of || !tolerance.dim, "output ", Quoted{output.name}, " has dim and no ranking_of");
  if (tolerance.ranking_of) check_ranking(output, output_named(call, *tolerance.ranking_of));
  if (tolerance.rows_of) check_rows(output, output_named(call, *tolerance.rows_of));
  if (tolerance.gradient_of) check_gradient(output, *tolerance.gradient_of, outputs, call);
}

}  // namespace

void check_call(const Call& call) {
  distinct(call.parameters, kName, "parameter");
  std::vector<std::pair<std::string, const Node*>> nodes;
  for (const Parameter& parameter : call.parameters) {
    require(is_name(parameter.name), "parameter ", Quoted{parameter.name}, " has a name that is not allowed");
    nodes.emplace_back(parameter.name, &parameter.value);
  }
  check_structure(nodes, call.inputs, "inputs");
  check_structure({{"", &call.result}}, call.outputs, "outputs");
  check_dimensions(call);
  Names outputs;
  for (const TensorOutput& output : call.outputs) outputs.insert(output.name);
  for (const TensorOutput& output : call.outputs) check_tolerance(output, outputs, call);
  for (const TensorInput& input : call.inputs) {
    if (!input.written) continue;
    check_own_tolerance(*input.written, "what is written into input " + shown(input.name));
    require(!outputs.contains(written_name(input)), "an output has the name ", Quoted{written_name(input)},
            ", which means what is written into that input");
  }
}

std::string written_name(const TensorInput& input) { return "written." + input.name; }

void check_own_tolerance(const OutputTolerance& tolerance, const std::string& what) {
  check_finite(tolerance, what);
  require(!tolerance.ranking_of && !tolerance.rows_of && !tolerance.gradient_of, what,
          " has ranking_of or rows_of or gradient_of, which only outputs have");
}

}  // namespace exportkit
