#include "package/state_files.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <ranges>
#include <set>

#include "package/digests.h"
#include "package/errors.h"
#include "package/guarded.h"
#include "package/json_fields.h"
#include "package/text.h"

namespace exportkit {

namespace {

// --- adapters of PEFT: https://huggingface.co/docs/peft/developer_guides/checkpoint ----------------------------------

constexpr const char* kWritten = "Give it as PEFT's save_pretrained wrote it.";
constexpr size_t kMostBytes = size_t{1} << 20;

[[noreturn]] void refuse(const std::string& what, const std::string& hint = {}) {
  throw Error(errors::kState, what, hint);
}

struct AdapterConfig {
  double alpha = 8;
  bool by_root = false;                                  // of the rank: rsLoRA
  std::vector<std::pair<std::string, double>> of_names;  // modules with another alpha

  // What the product of a module's two matrices is multiplied with.
  double scale(std::string_view module, int64_t rank) const {
    const auto own = std::ranges::find_if(
        of_names, [&](const auto& named) { return module == named.first || module.ends_with("." + named.first); });
    const auto ranks = static_cast<double>(rank);
    return (own == of_names.end() ? alpha : own->second) / (by_root ? std::sqrt(ranks) : ranks);
  }
};

// Keys that do not change what a trained adapter computes. Those that add tensors show in the file itself.
const std::set<std::string_view> kOfNoWeight{"auto_mapping",
                                             "base_model_name_or_path",
                                             "bias",
                                             "ensure_weight_tying",
                                             "eva_config",
                                             "exclude_modules",
                                             "fan_in_fan_out",
                                             "inference_mode",
                                             "layers_pattern",
                                             "layers_to_transform",
                                             "lora_bias",
                                             "lora_dropout",
                                             "megatron_config",
                                             "megatron_core",
                                             "modules_to_save",
                                             "peft_version",
                                             "qalora_group_size",
                                             "r",
                                             "rank_pattern",
                                             "revision",
                                             "runtime_config",
                                             "target_modules",
                                             "target_parameters",
                                             "task_type",
                                             "trainable_token_indices"};

// Ways to begin training that leave the model's own weights alone. Others, such as PiSSA, change them.
const std::set<std::string_view> kBeginnings{"true", "false", "null", "\"gaussian\"", "\"eva\"", "\"orthogonal\""};
const std::set<std::string_view> kNothing{"null", "false", "{}", "[]", "\"\""};

void only(std::string_view value, const std::set<std::string_view>& allowed, const std::string& path,
          std::string_view key) {
  if (allowed.contains(value)) return;
  refuse(concat(path, " has ", shown(value), " as ", Quoted{key}, ", which is not plain LoRA"),
         "Merge the adapter into the weights, and give those to `exportkit package --weights`.");
}

AdapterConfig parse(std::string_view text, const std::string& path) {
  AdapterConfig config;
  const auto numbers = nullable(object_of([](JsonReader& reader) { return reader.number(); }));
  JsonReader json = JsonReader::checked(text, 32);
  Members known{{"peft_type", [&] { only(json.skipped(), {"\"LORA\""}, path, "peft_type"); }},
                {"lora_alpha", [&] { config.alpha = json.number(); }},
                {"use_rslora", [&] { config.by_root = nullable(boolean)(json).value_or(false); }},
                {"init_lora_weights", [&] { only(json.skipped(), kBeginnings, path, "init_lora_weights"); }},
                {"alpha_pattern", [&] { config.of_names = numbers(json).value_or(config.of_names); }}};
  json.object([&](std::string_view key) {
    const auto member = known.find(key);
    if (member != known.end()) return member->second();
    const std::string_view value = json.skipped();
    if (!kOfNoWeight.contains(key)) only(value, kNothing, path, key);
  });
  for (const auto& [name, alpha] : config.of_names) {
    // PEFT matches a name as a regular expression, at the end of a module's.
    if (name.find_first_of("^$*+?()[]{}|\\") == std::string::npos) continue;
    refuse(path + " has the pattern " + shown(name) + " in `alpha_pattern`, a regular expression",
           "Write the names of the modules that it means.");
  }
  return config;
}

// Reads adapter_config.json in the folder of an adapter's file; nothing if there is none. StateError: it cannot be
// read, or it describes more than plain LoRA.
std::optional<AdapterConfig> read_adapter_config(const std::string& adapter) {
  const std::filesystem::path path = std::filesystem::path(adapter).parent_path() / "adapter_config.json";
  try {
    const std::optional<std::string> text = read_limited(path, /*guarded=*/false, kMostBytes);
    return text ? std::optional(parse(*text, path.string())) : std::nullopt;
  } catch (const JsonError& error) {
    refuse(path.string() + ": " + error.what(), kWritten);
  } catch (const std::exception&) {
    refuse(path.string() + " " + file_problem(), kWritten);
  }
}

using safetensors::Place;
using Shape = std::vector<int64_t>;
using RowSizes = std::map<std::string, int64_t>;

constexpr std::string_view kPeft = "base_model.model.";

std::string text_of(const Extent& extent) {
  if (const auto* fixed = std::get_if<int64_t>(&extent)) return std::to_string(*fixed);
  return json_text(std::get<Size>(extent).dimension);  // the state's sizes have scale 1 and offset 0
}

// --- LoRA ----------------------------------------------------------------------------------------------------------

// A name such as `layers.0.q_proj.lora_A.weight`.
struct LoraName {
  std::string module;
  bool second;  // lora_B
};

std::optional<LoraName> lora_name(std::string_view name) {
  for (const std::string_view part : {".lora_A.", ".lora_B."}) {
    const size_t at = name.find(part);
    if (at == std::string_view::npos) continue;
    return LoraName{std::string(name.substr(0, at)), part == ".lora_B."};
  }
  return std::nullopt;
}

[[noreturn]] void refuse_other_kind(const StateFile& file, const StateTensor& state, const Place& place,
                                    const RowSizes& sizes) {
  refuse(file.path + ": " + printable(place.name) + " is " + kind_text(place.dtype, place.shape) +
             "; the session's is " + kind_text(state.dtype, shape_at(state.shape, sizes)),
         lora_name(state.name) ? "An adapter may have a smaller rank than the exported one, and another floating dtype."
                               : "A session takes the state of one with the same sizes.");
}

// What a state file says about its owner. Nothing if it does not say who that is.
const std::string* said(const StateFile& file, const char* key) {
  const auto found = file.metadata.find(key);
  return found == file.metadata.end() ? nullptr : &found->second;
}

void check_model(const StateFile& file, const Manifest& manifest) {
  const std::string* model = said(file, kStateFileModel);
  if (model == nullptr || *model == manifest.name) return;
  refuse(file.path + " has the state of the model " + shown(*model) + "; this is " + manifest.name);
}

// The scale of a file's adapters, which PEFT's configuration has. A session's own file has scaled numbers.
class Adapter {
 public:
  explicit Adapter(const StateFile& file) : file_(file) {
    for (const Place& place : file.places) {
      const auto name = lora_name(place.name);
      if (!name) continue;
      const size_t axis = name->second ? 1 : 0;
      (name->second ? second_ : first_)[name->module] = axis < place.shape.size() ? place.shape[axis] : -1;
    }
    if (!any() || said(file, kStateFileModel) != nullptr) return;
    check_ranks(first_, second_);
    check_ranks(second_, first_);
    config_ = read_adapter_config(file.path);
    if (config_) return;
    refuse(file.path + " has an adapter, and no adapter_config.json lies beside it, which says its scale",
           "Give the file in the folder that PEFT's save_pretrained wrote.");
  }

  bool any() const { return !first_.empty() || !second_.empty(); }

  double scale(const LoraName& name) const {
    return config_ && name.second ? config_->scale(name.module, second_.at(name.module)) : 1;
  }

 private:
  using Ranks = std::map<std::string, int64_t>;

  void check_ranks(const Ranks& ranks, const Ranks& others) const {
    for (const auto& [module, rank] : ranks) {
      const auto other = others.find(module);
      if (rank > 0 && other != others.end() && other->second == rank) continue;
      refuse(file_.path + " does not have lora_A and lora_B of one rank for " + printable(module));
    }
  }

  const StateFile& file_;
  Ranks first_, second_;  // by module
  std::optional<AdapterConfig> config_;
};

// --- a part --------------------------------------------------------------------------------------------------------

// The index of the state that a tensor's name means.
size_t state_named(const std::string& given, const Manifest& manifest, const StateFile& file) {
  const std::string_view name = std::string_view(given).substr(given.starts_with(kPeft) ? kPeft.size() : 0);
  const auto may_be = [&, end = concat(".", name)](const std::string& known) {
    return known == name || known.ends_with(end);
  };
  std::vector<size_t> found;
  for (size_t i = 0; i < manifest.state.size(); ++i) {
    const StateTensor& state = manifest.state[i];
    if (state.name == given || std::ranges::count(state.aliases, given) > 0) return i;
    if (may_be(state.name) || std::ranges::any_of(state.aliases, may_be)) found.push_back(i);
  }
  if (found.size() == 1) return found.front();
  const std::string has = file.path + " has the tensor " + shown(given);
  if (!found.empty()) {
    refuse(has + ", which can be " + manifest.state[found.front()].name + " or " + manifest.state[found.back()].name);
  }
  std::vector<std::string> first;
  for (const StateTensor& state : manifest.state | std::views::take(3)) first.push_back(state.name);
  if (manifest.state.size() > 3) first.push_back("...");
  refuse(has + ", which is not in the state of " + manifest.name, "The state is " + joined(first) + ".");
}

// Returns the shape after padding with zeros, or nothing if the tensor does not fit. PEFT's adapters have no rows.
std::optional<Shape> padded(const StateTensor& state, const RowSizes& sizes, const Place& place,
                            const std::optional<LoraName>& lora, bool own) {
  Shape shape = shape_at(state.shape, sizes);
  if (rows_of(state) && ((lora && !own) || place.shape.size() + 1 == shape.size())) shape.erase(shape.begin());
  const size_t rows = rows_of(state) && shape.size() == state.shape.size();
  if (place.shape.size() != shape.size()) return std::nullopt;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const bool rank = lora && axis == rows + (lora->second ? 1 : 0);
    if (rank ? place.shape[axis] > shape[axis] : place.shape[axis] != shape[axis]) return std::nullopt;
  }
  const bool same = place.dtype == state.dtype || (lora && is_floating(place.dtype) && is_floating(state.dtype));
  return same ? std::optional(shape) : std::nullopt;
}

}  // namespace

std::string state_digest(const Manifest& manifest) {
  return sha256_hex(json_list(manifest.state, [](const StateTensor& tensor) {
    return json_object({{"name", json_text(tensor.name)},
                        {"dtype", json_text(tensor.dtype)},
                        {"shape", json_list(tensor.shape, text_of)}});
  }));
}

std::vector<StateValue> match_whole_state(const Manifest& manifest, const RowSizes& sizes, const StateFile& file) {
  if (!said(file, kStateFileModel) || !said(file, kStateFileDigest)) {
    refuse(file.path + " does not say which model's state it has",
           "Give a file that a session's save wrote, or load what this one names: partial=True.");
  }
  check_model(file, manifest);
  if (*said(file, kStateFileDigest) != state_digest(manifest)) {
    refuse(file.path + " has the state of another " + manifest.name + ": the names, dtypes or shapes differ",
           "Load it with the package whose session saved it.");
  }
  std::map<std::string, const Place*> given;
  for (const Place& place : file.places) given.emplace(place.name, &place);
  std::vector<StateValue> values;
  for (size_t i = 0; i < manifest.state.size(); ++i) {
    const StateTensor& state = manifest.state[i];
    const auto node = given.extract(state.name);
    if (node.empty()) refuse(file.path + " has no tensor " + state.name);
    const Place& place = *node.mapped();
    const Shape shape = shape_at(state.shape, sizes);
    if (place.dtype != state.dtype || place.shape != shape) refuse_other_kind(file, state, place, sizes);
    values.push_back({i, &place, 1, shape});
  }
  if (!given.empty()) {
    refuse(file.path + " has the tensor " + shown(given.begin()->first) + ", which is not in the state of " +
           manifest.name);
  }
  return values;
}

std::vector<StateValue> match_part_of_state(const Manifest& manifest, const RowSizes& sizes, const StateFile& file,
                                            bool one_row) {
  check_model(file, manifest);
  if (file.places.empty())
    refuse(file.path + " has no tensors", "Give a file with a part of the state of " + manifest.name + ".");
  RowSizes rows = sizes;
  for (auto& [dimension, size] : rows) size = one_row ? 1 : size;
  const Adapter adapter(file);
  const bool own = said(file, kStateFileModel) != nullptr;
  std::map<size_t, StateValue> values;
  for (const Place& place : file.places) {
    const size_t index = state_named(place.name, manifest, file);
    const StateTensor& state = manifest.state[index];
    const auto lora = lora_name(place.name);
    const auto shape = padded(state, rows, place, lora, own);
    if (!shape) refuse_other_kind(file, state, place, rows);
    if (!values.emplace(index, StateValue{index, &place, lora ? adapter.scale(*lora) : 1, *shape}).second) {
      refuse(file.path + " has two tensors for " + state.name);
    }
  }
  for (size_t i = 0; adapter.any() && i < manifest.state.size(); ++i) {
    if (lora_name(manifest.state[i].name))
      values.emplace(i, StateValue{i, nullptr, 1, shape_at(manifest.state[i].shape, rows)});
  }
  std::vector<StateValue> ordered;
  for (auto& [index, value] : values) {
    if (one_row && !rows_of(manifest.state[index])) {
      refuse(manifest.state[index].name + " has no rows, so that one row of it cannot be set", "Leave out `row`.");
    }
    ordered.push_back(std::move(value));
  }
  return ordered;
}

// --- a model's state_dict --------------------------------------------------------------------------------------------

std::map<std::string, std::vector<const Place*>> match_state(const std::vector<Weight>& weights,
                                                             const std::vector<StateTensor>& state,
                                                             const std::vector<Place>& given) {
  std::map<std::string, const Place*> unmatched;
  for (const Place& place : given) unmatched.emplace(place.name, &place);
  for (const StateTensor& one : state) {
    unmatched.erase(one.name);
    for (const std::string& alias : one.aliases) unmatched.erase(alias);
  }
  std::map<std::string, std::vector<const Place*>> found;
  std::map<std::string, std::string> other;  // by the given name, so that messages are sorted
  std::vector<std::string> missing, not_of_the_model, of_another_kind;
  for (const Weight& weight : weights) {
    if (!weight.state) continue;
    std::vector<const Place*>& places = found[weight.name];
    std::vector<std::string> names{weight.name};
    names.insert(names.end(), weight.aliases.begin(), weight.aliases.end());
    for (const std::string& name : names) {
      const auto node = unmatched.extract(name);
      if (node.empty()) continue;
      const Place& place = *places.emplace_back(node.mapped());
      if (place.dtype != weight.dtype || place.shape != weight.shape) {
        other.emplace(name, printable(name) + " is " + kind_text(place.dtype, place.shape) + ", not " +
                                kind_text(weight.dtype, weight.shape));
      }
    }
    if (places.empty()) missing.push_back(printable(joined(names, " or ")));
  }
  for (const auto& [name, place] : unmatched) not_of_the_model.push_back(printable(name));
  for (const auto& [name, text] : other) of_another_kind.push_back(text);
  std::string faults;
  const auto add = [&](const char* what, const std::vector<std::string>& which) {
    if (!which.empty()) faults += std::string("\n  ") + what + ": " + joined(which, ", ");
  };
  add("missing", missing);
  add("not in the model", not_of_the_model);
  add("wrong dtype or shape", of_another_kind);
  if (faults.empty()) return found;
  throw Error(errors::kWeights, "the weights do not fit the model" + faults,
              "Give the model's whole state_dict with the same names, dtypes and shapes. One name of a tied weight is "
              "enough.");
}

}  // namespace exportkit
