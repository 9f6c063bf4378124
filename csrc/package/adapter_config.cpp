#include "package/adapter_config.h"

#include <cmath>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <system_error>

#include "package/errors.h"
#include "package/json_fields.h"
#include "package/small_files.h"
#include "package/text.h"

namespace exportkit {
namespace {

constexpr const char* kWritten = "Give it as PEFT's save_pretrained wrote it.";
constexpr size_t kMostBytes = size_t{1} << 20;

[[noreturn]] void refuse(const std::string& what, const std::string& hint) { throw Error(errors::kState, what, hint); }

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

// PEFT matches a name as a regular expression, at the end of a module's.
void check_names(const AdapterConfig& config, const std::string& path) {
  for (const auto& [name, alpha] : config.of_names) {
    if (name.find_first_of("^$*+?()[]{}|\\") == std::string::npos) continue;
    refuse(path + " has the pattern " + shown(name) + " in `alpha_pattern`, a regular expression",
           "Write the names of the modules that it means.");
  }
}

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
  json.end();
  check_names(config, path);
  return config;
}

}  // namespace

double AdapterConfig::scale(std::string_view module, int64_t rank) const {
  double own = alpha;
  for (const auto& [name, other] : of_names) {
    if (module != name && !module.ends_with("." + name)) continue;
    own = other;
    break;
  }
  return own / (by_root ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
}

std::optional<AdapterConfig> read_adapter_config(const std::string& adapter) {
  const std::filesystem::path path = std::filesystem::path(adapter).parent_path() / "adapter_config.json";
  std::optional<std::string> text;
  try {
    text = read_limited(path, /*guarded=*/false, kMostBytes);
    if (!text) return std::nullopt;
    return parse(*text, path.string());
  } catch (const JsonError& error) {
    refuse(path.string() + ": " + error.what(), kWritten);
  } catch (const std::system_error& error) {
    refuse(path.string() + " cannot be read: " + error.code().message(), kWritten);
  } catch (const std::invalid_argument& error) {
    refuse(path.string() + " " + error.what(), kWritten);
  }
}

}  // namespace exportkit
