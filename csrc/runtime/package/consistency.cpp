#include "runtime/package/consistency.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "runtime/package/errors.h"
#include "runtime/package/text.h"

namespace exportkit {

namespace {

constexpr std::string_view kAotInductorDir = "data/aotinductor/", kOperatorsDir = "exportkit/ops/",
                           kCasesDir = "exportkit/cases/", kWeightsDir = "data/weights/";
constexpr int64_t kMaxSize = int64_t{1} << 62;
constexpr size_t kMaxRank = 64;  // sizes of a tensor

using Names = std::unordered_set<std::string_view>;

[[noreturn]] void contradict(const std::string& message) { throw Error(errors::kManifestConsistency, message); }

template <class F>
void require(bool holds, const F& message) {
  if (!holds) contradict(message());
}

// Each name of a list, found once.
template <class List, class NameOf>
Names distinct(const List& list, NameOf name_of, const char* what) {
  Names seen;
  for (const auto& item : list) {
    const std::string_view name = name_of(item);
    require(seen.insert(name).second, [&] { return std::string(what) + " " + shown(name) + " is there twice"; });
  }
  return seen;
}

constexpr auto kItself = [](const auto& item) -> std::string_view { return item; };
constexpr auto kName = [](const auto& item) -> std::string_view { return item.name; };
constexpr auto kRecord = [](const auto& item) -> std::string_view { return item.record; };

// --- names ---------------------------------------------------------------------------------------------------------

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Takes the characters that satisfy `allowed` off the front; false where there is none.
template <class F>
bool take_while(std::string_view& text, const F& allowed) {
  const size_t count = std::find_if_not(text.begin(), text.end(), allowed) - text.begin();
  text.remove_prefix(count);
  return count > 0;
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  const bool there = text.starts_with(prefix);
  text.remove_prefix(there ? prefix.size() : 0);
  return there;
}

// 2.13, 2.13.0+cpu
bool is_version(std::string_view text) {
  const auto tail = [](char c) { return is_digit(c) || is_letter(c) || c == '.' || c == '+'; };
  if (!take_while(text, is_digit) || !take_prefix(text, ".") || !take_while(text, is_digit)) return false;
  return text.empty() || (take_prefix(text, ".") && take_while(text, tail) && text.empty());
}

void check_version(const std::string& version, const std::string& what) {
  require(is_version(version),
          [&] { return what + " is " + shown(version) + ", which is no version such as \"2.13\""; });
}

// namespace::name, namespace::name.overload
bool is_operator_name(std::string_view text) {
  const auto word = [&text] {
    if (!text.empty() && is_digit(text[0])) return false;
    return take_while(text, [](char c) { return is_digit(c) || is_letter(c) || c == '_'; });
  };
  if (!word() || !take_prefix(text, "::") || !word()) return false;
  return text.empty() || (take_prefix(text, ".") && word() && text.empty());
}

struct Dtype {
  std::string_view name;
  uint64_t bytes;  // of one element
};
constexpr Dtype kDtypes[] = {
    {"bool", 1},     {"uint8", 1},           {"int8", 1},    {"float8_e4m3fn", 1},   {"float8_e5m2", 1},
    {"int16", 2},    {"float8_e4m3fnuz", 1}, {"uint16", 2},  {"float8_e5m2fnuz", 1}, {"float16", 2},
    {"bfloat16", 2}, {"int32", 4},           {"uint32", 4},  {"float32", 4},         {"complex32", 4},
    {"int64", 8},    {"uint64", 8},          {"float64", 8}, {"complex64", 8},       {"complex128", 16}};

// 0 for an unknown one.
uint64_t item_bytes(std::string_view dtype) {
  const auto* found =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const Dtype& d) { return d.name == dtype; });
  return found == std::end(kDtypes) ? 0 : found->bytes;
}

// --- structures ----------------------------------------------------------------------------------------------------

const std::vector<Node>* items_of(const Node& node) {
  if (const auto* sequence = std::get_if<SequenceNode>(&node.value)) return &sequence->items;
  if (const auto* mapping = std::get_if<MappingNode>(&node.value)) return &mapping->items;
  if (const auto* tuple = std::get_if<NamedTupleNode>(&node.value)) return &tuple->items;
  return nullptr;
}

const std::vector<std::string>* keys_of(const Node& node) {
  if (const auto* mapping = std::get_if<MappingNode>(&node.value)) return &mapping->keys;
  if (const auto* tuple = std::get_if<NamedTupleNode>(&node.value)) return &tuple->fields;
  return nullptr;
}

void check_named_tuple(const NamedTupleNode& node, const std::string& what) {
  const auto check = [&](const std::string& name) {
    require(is_identifier(name) && !is_keyword(name),
            [&] { return what + ": " + shown(name) + " cannot name a named tuple or a field of one"; });
  };
  check(node.class_name);
  for (const std::string& name : node.fields) {
    check(name);
    require(name[0] != '_', [&] { return what + ": a named tuple's field cannot start with an underscore"; });
  }
}

// Every container can be built, and they have the tensors from `next` on, in order.
void check_node(const Node& node, const std::string& what, int64_t& next, int depth = 0) {
  require(depth <= kMaxStructureDepth, [&] {
    return "the " + what + " are nested deeper than " + std::to_string(kMaxStructureDepth) + " containers";
  });
  if (const auto* tensor = std::get_if<TensorNode>(&node.value)) {
    require(tensor->index == next, [&] {
      return "the structure of the " + what + " has tensor " + std::to_string(tensor->index) + " in place of tensor " +
             std::to_string(next);
    });
    ++next;
    return;
  }
  const std::vector<Node>* items = items_of(node);
  if (!items) return;
  if (const std::vector<std::string>* keys = keys_of(node)) {
    distinct(*keys, kItself, ("key of the " + what).c_str());
    require(keys->size() == items->size(), [&] {
      return what + ": " + std::to_string(keys->size()) + " keys for " + std::to_string(items->size()) + " items";
    });
  }
  if (const auto* tuple = std::get_if<NamedTupleNode>(&node.value)) check_named_tuple(*tuple, what);
  for (const Node& item : *items) check_node(item, what, next, depth + 1);
}

// Calls on_name for each tensor, in order. `path` is that of the node, and the same again afterwards. A path is not
// copied: a long key around many items would be copied for each.
void for_each_leaf(const Node& node, std::string& path, const std::function<void(const std::string&)>& on_name) {
  if (std::holds_alternative<TensorNode>(node.value)) on_name(path.empty() ? "0" : path);
  const std::vector<Node>* items = items_of(node);
  if (!items) return;
  const std::vector<std::string>* keys = keys_of(node);
  const size_t length = path.size();
  for (size_t i = 0; i < items->size(); ++i) {
    if (length > 0) path += '.';
    path += keys ? (*keys)[i] : std::to_string(i);
    for_each_leaf((*items)[i], path, on_name);
    path.resize(length);
  }
}

// Every tensor has its one place in the structure, in order, and is named by that place.
template <class Tensor>
void check_structure(std::vector<std::pair<std::string, const Node*>> nodes, const std::vector<Tensor>& tensors,
                     const std::string& what) {
  int64_t next = 0;
  for (const auto& [prefix, node] : nodes) check_node(*node, what, next);
  require(next == static_cast<int64_t>(tensors.size()), [&] {
    return "the structure of the " + what + " has " + std::to_string(next) + " tensors; there are " +
           std::to_string(tensors.size());
  });
  // Compared one by one: long keys around many tensors make names that together are larger than any memory.
  size_t at = 0;
  for (auto& [prefix, node] : nodes) {
    for_each_leaf(*node, prefix, [&](const std::string& name) {
      const Tensor& tensor = tensors[at++];
      require(tensor.name == name,
              [&] { return what + ": the tensor named " + shown(tensor.name) + " has its place at " + shown(name); });
      require(item_bytes(tensor.dtype) > 0,
              [&] { return what + ": " + shown(name) + " has the unknown dtype " + shown(tensor.dtype); });
    });
  }
  distinct(tensors, kName, ("tensor among the " + what).c_str());
}

// --- the call ------------------------------------------------------------------------------------------------------

using Dimensions = std::unordered_map<std::string_view, const Dimension*>;

Dimensions dimensions_of(const Call& call) {
  Dimensions found;
  for (const Dimension& dimension : call.dimensions) found.emplace(dimension.name, &dimension);
  return found;
}

// The scale and the offset may be large and cancel out.
__int128 value_at(const Size& size, int64_t n) { return static_cast<__int128>(size.scale) * n + size.offset; }

void check_size(const Size& size, const std::string& tensor, const Dimensions& dimensions) {
  const auto found = dimensions.find(size.dimension);
  require(found != dimensions.end(), [&] {
    return shown(tensor) + " has a size of dimension " + shown(size.dimension) + ", which is not declared";
  });
  require(value_at(size, found->second->min) >= 0 && value_at(size, found->second->max) <= kMaxSize, [&] {
    return shown(tensor) + " has a size of " + std::to_string(size.scale) + "*" + size.dimension + " and " +
           std::to_string(size.offset) + ", which is negative or too large";
  });
}

const Size* size_of(const Extent& extent) { return std::get_if<Size>(&extent); }
const Size* size_of(const std::optional<Extent>& extent) { return extent ? size_of(*extent) : nullptr; }

// The least value of a size whose dimension is declared; of one that is not known, 0.
uint64_t least_of(const Extent& extent, const Dimensions& dimensions) {
  const Size* size = size_of(extent);
  if (!size) return static_cast<uint64_t>(std::get<int64_t>(extent));
  return static_cast<uint64_t>(value_at(*size, dimensions.at(size->dimension)->min));
}
uint64_t least_of(const std::optional<Extent>& extent, const Dimensions& dimensions) {
  return extent ? least_of(*extent, dimensions) : 0;
}

// Sizes of declared dimensions, and no more elements than there can be.
template <class Tensor>
void check_shape(const Tensor& tensor, const Dimensions& dimensions) {
  require(tensor.shape.size() <= kMaxRank, [&] {
    return shown(tensor.name) + " has " + std::to_string(tensor.shape.size()) + " sizes; at most " +
           std::to_string(kMaxRank) + " are allowed";
  });
  std::vector<uint64_t> least;
  for (const auto& extent : tensor.shape) {
    if (const Size* size = size_of(extent)) check_size(*size, tensor.name, dimensions);
    least.push_back(least_of(extent, dimensions));
  }
  if (std::find(least.begin(), least.end(), 0) != least.end()) return;
  unsigned __int128 count = 1;
  for (const uint64_t size : least) {
    count *= size;  // of two numbers that are at most 2^62
    require(count <= kMaxSize,
            [&] { return shown(tensor.name) + " has more than 2^62 elements at least, which no memory holds"; });
  }
}

void check_dimensions(const Call& call) {
  distinct(call.dimensions, kName, "dimension");
  for (const Dimension& dimension : call.dimensions) {
    require(dimension.min <= dimension.max, [&] {
      return "dimension " + dimension.name + " has min " + std::to_string(dimension.min) + " above max " +
             std::to_string(dimension.max);
    });
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
    require(used.contains(dimension.name),
            [&] { return "dimension " + dimension.name + " is no input's: nothing gives it a value"; });
  }
}

void check_tolerance(const TensorOutput& output, const Names& outputs) {
  const OutputTolerance& tolerance = output.tolerance;
  require(std::isfinite(tolerance.rtol) && std::isfinite(tolerance.atol),
          [&] { return "output " + shown(output.name) + " has a tolerance that is not finite"; });
  for (const auto& other : {tolerance.ranking_of, tolerance.rows_of}) {
    require(!other || (*other != output.name && outputs.contains(*other)), [&] {
      return "output " + shown(output.name) + " refers to " + shown(*other) + ", which is not another output";
    });
  }
}

void check_call(const Call& call) {
  distinct(call.parameters, kName, "parameter");
  std::vector<std::pair<std::string, const Node*>> nodes;
  for (const Parameter& parameter : call.parameters) {
    require(is_identifier(parameter.name), [&] { return "parameter " + shown(parameter.name) + " is no Python name"; });
    nodes.emplace_back(parameter.name, &parameter.value);
  }
  check_structure(nodes, call.inputs, "inputs");
  check_structure({{"", &call.result}}, call.outputs, "outputs");
  check_dimensions(call);
  Names outputs;
  for (const TensorOutput& output : call.outputs) outputs.insert(output.name);
  for (const TensorOutput& output : call.outputs) check_tolerance(output, outputs);
}

// --- what can run it -----------------------------------------------------------------------------------------------

using Digests = std::unordered_map<std::string_view, std::string_view>;

void check_reference(const std::string& what, const std::string& record, const std::string& folder,
                     const Digests& records) {
  require(records.contains(record), [&] { return what + ": there is no record " + shown(record); });
  require(record.starts_with(folder), [&] { return what + ": it is not under " + folder; });
}

void check_records(const Manifest& manifest, const Digests& records) {
  const auto out_of_order = [](const Record& one, const Record& next) { return one.name >= next.name; };
  require(std::adjacent_find(manifest.records.begin(), manifest.records.end(), out_of_order) == manifest.records.end(),
          [] { return "the records are not sorted by name, each once"; });
  for (const Library& library : manifest.libraries) {
    check_reference("library " + shown(library.record), library.record,
                    std::string(kOperatorsDir) + library.platform + "/", records);
  }
  for (const Case& recorded : manifest.cases) {
    check_reference("case " + shown(recorded.record), recorded.record, std::string(kCasesDir), records);
  }
  if (manifest.program) {
    check_reference("the program", manifest.program->record, "", records);
    check_version(manifest.program->built_with_torch, "the program's built_with_torch");
  }
}

void check_target(const Target& target) {
  const std::string what = "target " + target.name;
  check_version(target.needs_torch, what + ": needs_torch");
  check_version(target.built_with_torch, what + ": built_with_torch");
  if (target.built_with_cuda) check_version(*target.built_with_cuda, what + ": built_with_cuda");
  const bool cuda = target.device == "cuda";
  require(cuda == target.cuda_architecture.has_value(), [&] {
    return what + " for " + target.device + " has cuda_architecture " +
           (target.cuda_architecture ? shown(*target.cuda_architecture) : "null");
  });
  require(cuda || !target.cuda_ptx, [&] { return what + " for " + target.device + " has cuda_ptx"; });
}

void check_targets(const Manifest& manifest) {
  require(!manifest.targets.empty() || manifest.program,
          [] { return "there is neither a target nor a program: nothing to run"; });
  distinct(manifest.targets, kName, "target");
  std::set<std::string_view> names;  // sorted: a prefix comes right before what it is a prefix of
  for (const Target& target : manifest.targets) names.insert(target.name);
  const auto prefix = std::adjacent_find(names.begin(), names.end(),
                                         [](auto shorter, auto longer) { return longer.starts_with(shorter); });
  require(prefix == names.end(), [&] {
    return "target " + std::string(*prefix) + " is a prefix of target " + std::string(*std::next(prefix)) +
           ": torch would take the records of both for one model";
  });
  Names with_code;
  for (const Record& record : manifest.records) {
    std::string_view rest = record.name;
    if (!take_prefix(rest, kAotInductorDir)) continue;
    const size_t slash = rest.find('/');
    const std::string_view folder = rest.substr(0, slash);
    require(names.contains(folder), [&] { return "record " + shown(record.name) + " belongs to no target"; });
    if (slash != std::string_view::npos && rest.ends_with(".so")) with_code.insert(folder);
  }
  for (const Target& target : manifest.targets) {
    require(with_code.contains(target.name), [&] {
      return "target " + target.name + " has no compiled code: no record " + std::string(kAotInductorDir) +
             target.name + "/*.so";
    });
    check_target(target);
  }
}

void check_operators(const std::vector<Operator>& operators, const std::string& where) {
  distinct(operators, kName, ("operator in " + where + ":").c_str());
  for (const Operator& op : operators) {
    require(is_operator_name(op.name),
            [&] { return where + ": " + shown(op.name) + " is no operator's name (namespace::name.overload)"; });
    require(op.schema.starts_with(op.name + "("),
            [&] { return where + ": " + op.name + " has the schema of another: " + shown(op.schema); });
  }
}

void check_libraries(const Manifest& manifest, const Digests& records) {
  distinct(manifest.libraries, kRecord, "library");
  std::unordered_map<std::string_view, std::string_view> wanted;
  for (const Operator& op : manifest.operators) wanted.emplace(op.name, op.schema);
  using PlatformAndName = std::pair<std::string_view, std::string_view>;
  std::map<PlatformAndName, std::string_view> definers;
  for (const Library& library : manifest.libraries) {
    const std::string what = "library " + shown(library.record);
    require(library.sha256 == records.at(library.record), [&] { return what + " has another sha256 than its record"; });
    check_operators(library.defines, shown(library.record));
    check_version(library.needs_torch, what + ": needs_torch");
    if (library.torch_bound) check_version(*library.torch_bound, what + ": torch_bound");
    for (const Operator& op : library.defines) {
      const auto other = definers.emplace(PlatformAndName{library.platform, op.name}, library.record).first;
      require(other->second == library.record,
              [&] { return shown(other->second) + " and " + shown(library.record) + " both define " + op.name; });
      const auto traced = wanted.find(op.name);
      require(traced == wanted.end() || traced->second == op.schema, [&] {
        return what + " defines " + shown(op.schema) + ", but the graph was traced with " + shown(traced->second);
      });
    }
  }
}

void check_cases(const Manifest& manifest) {
  distinct(manifest.cases, kRecord, "case");
  const Dimensions dimensions = dimensions_of(manifest.call);
  for (const Case& recorded : manifest.cases) {
    // No name is there twice, so as many that are all declared are the same ones.
    require(recorded.sizes.size() == dimensions.size(), [&] {
      return "case " + shown(recorded.record) + " gives sizes for " + std::to_string(recorded.sizes.size()) +
             " dimensions of " + std::to_string(dimensions.size());
    });
    for (const auto& given : recorded.sizes) {
      const std::string& name = given.first;
      const int64_t size = given.second;
      const auto found = dimensions.find(name);
      require(found != dimensions.end(),
              [&] { return "case " + shown(recorded.record) + " has a size for " + name + ", which is no dimension"; });
      require(found->second->min <= size && size <= found->second->max, [&] {
        return "case " + shown(recorded.record) + " has " + name + " = " + std::to_string(size) + ", outside of " +
               std::to_string(found->second->min) + " to " + std::to_string(found->second->max);
      });
    }
  }
}

// --- weights -------------------------------------------------------------------------------------------------------

// The strides address every element of the record once: nothing is read outside of it.
void check_strides(const Weight& weight) {
  const std::string what = "weight " + shown(weight.name);
  require(item_bytes(weight.dtype) > 0, [&] { return what + " has the unknown dtype " + shown(weight.dtype); });
  require(weight.strides.size() == weight.shape.size(), [&] {
    return what + " has " + std::to_string(weight.strides.size()) + " strides for " +
           std::to_string(weight.shape.size()) + " dimensions";
  });
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (size_t i = 0; i < weight.shape.size(); ++i) {
    if (weight.shape[i] == 0) return;
    if (weight.shape[i] > 1) steps.emplace_back(weight.strides[i], weight.shape[i]);
  }
  std::sort(steps.begin(), steps.end());
  unsigned __int128 step = 1;
  for (const auto& [stride, size] : steps) {
    require(static_cast<uint64_t>(stride) == step, [&] { return what + " has strides that leave gaps or overlap"; });
    step *= static_cast<uint64_t>(size);  // a stride is at most 2^62, and so is what it was compared with
  }
}

void check_weight_record(const Weight& weight, const Manifest& manifest) {
  const std::string what = "weight " + shown(weight.name);
  const auto found = std::lower_bound(manifest.records.begin(), manifest.records.end(), *weight.record,
                                      [](const Record& record, const std::string& name) { return record.name < name; });
  require(found != manifest.records.end() && found->name == *weight.record,
          [&] { return what + ": there is no record " + shown(*weight.record); });
  require(found->name.starts_with(kWeightsDir),
          [&] { return what + ": " + shown(found->name) + " is not under " + std::string(kWeightsDir); });
  require(static_cast<uint64_t>(found->size) == weight_bytes(weight), [&] {
    return what + " has another number of bytes than its record " + shown(found->name) + ", which has " +
           std::to_string(found->size);
  });
}

void check_weights(const Manifest& manifest) {
  std::unordered_map<std::string_view, const Weight*> weights;
  Names seen;
  for (const Weight& weight : manifest.weights) {
    weights.emplace(weight.name, &weight);
    const auto check_name = [&](std::string_view name) {
      require(seen.insert(name).second, [&] { return "weight " + shown(name) + " is there twice"; });
    };
    check_name(weight.name);
    for (const std::string& alias : weight.aliases) check_name(alias);
    check_strides(weight);
    if (weight.record) check_weight_record(weight, manifest);
  }
  for (const Target& target : manifest.targets) {
    for (const auto& constant : target.constants) {
      const std::string& name = constant.second;
      const auto found = weights.find(name);
      require(found != weights.end() && found->second->record, [&] {
        return "target " + target.name + " takes " + shown(constant.first) + " from " + shown(name) +
               ", which is no weight with a record";
      });
    }
  }
}

}  // namespace

uint64_t weight_bytes(const Weight& weight) {
  if (std::find(weight.shape.begin(), weight.shape.end(), 0) != weight.shape.end()) return 0;
  // Capped where no record can be as large, so that nothing overflows.
  constexpr unsigned __int128 kMost = std::numeric_limits<uint64_t>::max();
  unsigned __int128 bytes = item_bytes(weight.dtype);
  for (const int64_t size : weight.shape) bytes = std::min(bytes * static_cast<uint64_t>(size), kMost);
  return static_cast<uint64_t>(bytes);
}

void check_consistency(const Manifest& manifest) {
  Digests records;
  for (const Record& record : manifest.records) records.emplace(record.name, record.sha256);
  check_call(manifest.call);
  check_records(manifest, records);
  check_targets(manifest);
  check_weights(manifest);
  check_operators(manifest.operators, "operators");
  check_libraries(manifest, records);
  check_cases(manifest);
}

std::vector<const Library*> libraries_for(const Manifest& manifest, const Target& target) {
  std::vector<const Library*> usable;
  for (const Library& library : manifest.libraries) {
    const bool fits = library.device == "cpu" || library.device == target.device;
    if (library.platform == target.platform && fits) usable.push_back(&library);
  }
  std::sort(usable.begin(), usable.end(), [](const Library* one, const Library* other) {
    return std::pair(one->device != "cpu", std::string_view(one->record)) <
           std::pair(other->device != "cpu", std::string_view(other->record));
  });
  return usable;
}

std::vector<const Operator*> missing_operators(const Manifest& manifest, const Target& target) {
  Names defined;
  for (const Library* library : libraries_for(manifest, target)) {
    for (const Operator& op : library->defines) defined.insert(op.name);
  }
  std::vector<const Operator*> missing;
  for (const Operator& op : manifest.operators) {
    if (!defined.contains(op.name)) missing.push_back(&op);
  }
  return missing;
}

std::vector<std::string> leaf_names(const Node& node, std::string_view prefix) {
  std::vector<std::string> names;
  std::string path(prefix);
  for_each_leaf(node, path, [&](const std::string& name) { names.push_back(name); });
  return names;
}

}  // namespace exportkit
