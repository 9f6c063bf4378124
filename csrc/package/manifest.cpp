#include "package/manifest.h"

#include <algorithm>
#include <limits>

#include "package/errors.h"
#include "package/json_fields.h"
#include "package/text.h"

namespace exportkit {

namespace {

constexpr int64_t kMaxCount = int64_t{1} << 62;

// --- values --------------------------------------------------------------------------------------------------------

int64_t bounded(JsonReader& json, int64_t least, int64_t most) {
  const int64_t value = json.integer();
  if (least <= value && value <= most) return value;
  json.fail(concat("expected an integer from ", least, " to ", most));
}

int64_t count(JsonReader& json) { return bounded(json, 0, kMaxCount); }
int64_t opset(JsonReader& json) { return bounded(json, kMinOpset, kMaxOpset); }
int64_t scale(JsonReader& json) { return bounded(json, 1, std::numeric_limits<int64_t>::max()); }

double number(JsonReader& json) { return json.number(); }

double not_negative(JsonReader& json) {
  const double value = json.number();
  if (value < 0) json.fail("expected a number that is at least 0");
  return value;
}

std::string name(JsonReader& json) {
  std::string value = json.string();
  const auto allowed = [](char c) { return is_alnum(c) || c == '_' || c == '.' || c == '-'; };
  if (value.empty() || value.size() > 128 || value[0] == '.' || value[0] == '-' ||
      !std::all_of(value.begin(), value.end(), allowed)) {
    json.fail("expected 1 to 128 letters, digits and _.-, starting with a letter, a digit or _, found " + shown(value));
  }
  return value;
}

std::string checked_symbol(const JsonReader& json, std::string value) {
  if (is_word(value) && value.size() <= 64) return value;
  json.fail("expected 1 to 64 letters, digits and _, starting with a letter or _, found " + shown(value));
}

std::string symbol(JsonReader& json) { return checked_symbol(json, json.string()); }

// A file in the same folder. A longer name, or one with a control character, is a mistake.
std::string file_name(JsonReader& json) {
  std::string value = json.string();
  const auto refused = [](char c) { return c == '/' || static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (value.empty() || value.size() > 255 || value == "." || value == ".." ||
      std::any_of(value.begin(), value.end(), refused)) {
    json.fail(
        "expected the name of a file in the same folder, of 1 to 255 bytes without / and control characters, found " +
        shown(value));
  }
  return value;
}

// Reads null, a boolean, an integer, a number or a string, and keeps nothing.
std::monostate constant(JsonReader& json) {
  using enum JsonReader::Kind;
  const JsonReader::Kind kind = json.peek();
  if (kind == kObject || kind == kArray) json.fail("expected null, true, false, a number or a string");
  if (kind != kNumber) {
    json.skip();
  } else if (json.at_integer()) {
    json.integer();
  } else {
    json.number();
  }
  return {};
}

constexpr auto device = one_of("cpu", "cuda");

// --- objects -------------------------------------------------------------------------------------------------------

constexpr auto dimension = object(FIELD(Dimension, name, symbol), FIELD(Dimension, min, count),
                                  FIELD(Dimension, max, count), optional(FIELD(Dimension, tried, list(count))));

Extent extent(JsonReader& json) {
  if (json.peek() != JsonReader::Kind::kObject) return count(json);
  return object(FIELD(Size, dimension, symbol), FIELD(Size, scale, scale), FIELD(Size, offset, integer))(json);
}

Extent extent_or_null(JsonReader& json) {
  if (json.peek() != JsonReader::Kind::kNull) return extent(json);
  json.null();
  return std::monostate{};
}

constexpr auto gradient_of =
    object(FIELD(GradientOf, output, text), FIELD(GradientOf, input, text), FIELD(GradientOf, scale, number));

constexpr auto output_tolerance =
    object(FIELD(OutputTolerance, rtol, not_negative), FIELD(OutputTolerance, atol, not_negative),
           FIELD(OutputTolerance, ranking_of, nullable(text)), FIELD(OutputTolerance, rows_of, nullable(text)),
           optional(FIELD(OutputTolerance, dim, integer)), optional(FIELD(OutputTolerance, gradient_of, gradient_of)));

constexpr auto tensor_input =
    object(FIELD(TensorInput, name, text), FIELD(TensorInput, dtype, text), FIELD(TensorInput, shape, list(extent)),
           FIELD(TensorInput, written, nullable(output_tolerance)));

constexpr auto tensor_output =
    object(FIELD(TensorOutput, name, text), FIELD(TensorOutput, dtype, text),
           FIELD(TensorOutput, shape, list(extent_or_null)), FIELD(TensorOutput, tolerance, output_tolerance));

// The type may come last, after a nested tree as large as the manifest. So all fields are read in one pass, before the
// type is known.
Node read_node(JsonReader& json) {
  constexpr uint32_t kType = 1, kIndex = 2, kValue = 4, kKind = 8, kKeys = 16, kClassName = 32, kFields = 64,
                     kItems = 128;
  static const std::map<std::string_view, uint32_t> kKeysOf{{"tensor", kType | kIndex},
                                                            {"constant", kType | kValue},
                                                            {"sequence", kType | kKind | kItems},
                                                            {"mapping", kType | kKeys | kItems},
                                                            {"namedtuple", kType | kClassName | kFields | kItems}};
  Node node;
  const uint32_t found =
      fields(json, field("type", node.type, text), optional(field("index", node.index, count)),
             optional(unkept("value", constant)), optional(unkept("kind", one_of("list", "tuple"))),
             optional(field("keys", node.keys, list(text))), optional(field("class_name", node.class_name, text)),
             optional(field("fields", node.keys, list(text))), optional(field("items", node.items, list(read_node))));
  const auto wanted = kKeysOf.find(node.type);
  if (wanted != kKeysOf.end() && wanted->second == found) return node;
  json.fail("node of type " + shown(node.type) + ", which is unknown or has other keys");
}

constexpr auto parameter = object(FIELD(Parameter, name, text), FIELD(Parameter, kind, one_of("positional", "keyword")),
                                  FIELD(Parameter, value, read_node));

constexpr auto call = object(FIELD(Call, parameters, list(parameter)), FIELD(Call, inputs, list(tensor_input)),
                             FIELD(Call, result, read_node), FIELD(Call, outputs, list(tensor_output)),
                             FIELD(Call, dimensions, list(dimension)));

constexpr auto state_tensor =
    object(FIELD(StateTensor, name, text), FIELD(StateTensor, aliases, list(text)), FIELD(StateTensor, dtype, text),
           FIELD(StateTensor, shape, list(extent)), FIELD(StateTensor, initial, nullable(text)),
           FIELD(StateTensor, tolerance, output_tolerance));

constexpr auto state_use = object(FIELD(StateUse, index, count), FIELD(StateUse, written, boolean));

constexpr auto method =
    object(FIELD(Method, name, text), FIELD(Method, call, call), FIELD(Method, state, list(state_use)));

constexpr auto target =
    object(FIELD(Target, name, name), FIELD(Target, device, device), FIELD(Target, platform, name),
           FIELD(Target, cpu_isa, nullable(text)), FIELD(Target, cuda_architecture, nullable(text)),
           FIELD(Target, cuda_ptx, boolean), FIELD(Target, needs_torch, text), FIELD(Target, built_with_torch, text),
           FIELD(Target, built_with_cuda, nullable(text)), FIELD(Target, constants, object_of(object_of(text))));

constexpr auto weight =
    object(FIELD(Weight, name, text), FIELD(Weight, aliases, list(text)), FIELD(Weight, state, boolean),
           FIELD(Weight, dtype, text), FIELD(Weight, shape, list(count)), FIELD(Weight, strides, list(count)),
           FIELD(Weight, record, nullable(text)));

constexpr auto program =
    object(FIELD(Program, records, object_of(text)), unkept("device", device), FIELD(Program, built_with_torch, text));

constexpr auto onnx_data = [](JsonReader& json) {
  return fields(json, unkept("name", file_name), unkept("size", count), unkept("sha256", sha256));
};

constexpr auto onnx_function = object(field("operator", &OnnxFunction::op, text), FIELD(OnnxFunction, domain, text),
                                      FIELD(OnnxFunction, name, text), FIELD(OnnxFunction, overload, text));

constexpr auto onnx =
    object(FIELD(Onnx, method, text), unkept("size", count), unkept("sha256", sha256),
           unkept("data", nullable(onnx_data)), unkept("opset", opset), FIELD(Onnx, functions, list(onnx_function)));

constexpr auto operator_ = object(FIELD(Operator, name, text), FIELD(Operator, schema, text));

constexpr auto library =
    object(FIELD(Library, record, text), FIELD(Library, sha256, sha256), FIELD(Library, platform, name),
           FIELD(Library, device, device), unkept("kernels", list(one_of("cpu", "cuda", "any"))),
           FIELD(Library, defines, list(operator_)), FIELD(Library, needs_torch, text),
           FIELD(Library, torch_bound, nullable(text)), FIELD(Library, needs, list(text)),
           optional(FIELD(Library, adds_to, list(text))), optional(FIELD(Library, attestations, list(text))));

std::vector<std::pair<std::string, int64_t>> sizes(JsonReader& json) {
  std::vector<std::pair<std::string, int64_t>> out;
  json.object([&](std::string_view key) {
    std::string checked = checked_symbol(json, std::string(key));
    out.emplace_back(std::move(checked), count(json));
  });
  return out;
}

constexpr auto accuracy = object(FIELD(Accuracy, rms, not_negative), FIELD(Accuracy, greatest, not_negative));

constexpr auto case_call = object(FIELD(CaseCall, method, text), FIELD(CaseCall, sizes, sizes),
                                  FIELD(CaseCall, accuracy, object_of(nullable(accuracy))));

constexpr auto case_ = object(FIELD(Case, record, text), FIELD(Case, calls, list(case_call)),
                              FIELD(Case, reference_dtype, nullable(one_of("float64", "float32"))),
                              FIELD(Case, state_accuracy, object_of(nullable(accuracy))));

constexpr auto source = [](JsonReader& json) {
  return fields(json, unkept("model", nullable(text)), unkept("model_kwargs", object_of(constant)),
                unkept("dtype", nullable(text)), unkept("seed", integer), unkept("state_sha256", sha256));
};

constexpr auto provenance = object(FIELD(Provenance, tf32, boolean), unkept("exportkit", text), unkept("torch", text),
                                   unkept("commit", nullable(text)), unkept("dirty", nullable(boolean)));

constexpr auto record = object(FIELD(Record, name, text), FIELD(Record, size, count), FIELD(Record, sha256, sha256));

constexpr auto manifest =
    object(FIELD(Manifest, format_version, integer), FIELD(Manifest, name, name), FIELD(Manifest, version, text),
           FIELD(Manifest, methods, list(method)), FIELD(Manifest, state, list(state_tensor)),
           FIELD(Manifest, targets, list(target)), FIELD(Manifest, weights, list(weight)),
           FIELD(Manifest, program, nullable(program)), FIELD(Manifest, onnx, list(onnx)),
           FIELD(Manifest, operators, list(operator_)), FIELD(Manifest, libraries, list(library)),
           FIELD(Manifest, cases, list(case_)), unkept("source", source), FIELD(Manifest, provenance, provenance),
           FIELD(Manifest, records, list(record)));

// --- the whole manifest --------------------------------------------------------------------------------------------

// Checks the syntax of the whole text first. Then reads the version, since other versions may have other keys.
void survey(const JsonReader& start) {
  JsonReader whole = start;
  whole.skip();
  whole.end();
  const std::string_view version = format_version(start);
  if (version.empty()) throw JsonError("it is not an object with an integer `format_version`");
  if (version != std::to_string(kFormatVersion)) {
    const bool newer = version[0] != '-' && version[0] != '0';
    throw Error(
        errors::kFormatVersion,
        concat("the package has format version ", version.substr(0, 40), "; this exportkit reads ", kFormatVersion),
        newer ? "It was made by a newer exportkit. Install that one, or export the model again with this one."
              : "There is no such version. Export the model again with this exportkit.");
  }
  if (!whole.oddity().empty()) throw JsonError("it contains " + whole.oddity());
}

// Reads a part of a manifest. It is exportkit's own, or was checked as part of the whole.
template <class Read>
auto decode_part(std::string_view text, const Read& read) {
  JsonReader json = JsonReader::checked(text, kMaxManifestDepth);
  return read(json);
}

}  // namespace

int64_t size_at(const Size& size, int64_t number) {
  const __int128 exact = static_cast<__int128>(size.scale) * number + size.offset;
  return static_cast<int64_t>(std::clamp<__int128>(exact, INT64_MIN, INT64_MAX));
}

std::vector<int64_t> shape_at(const std::vector<Extent>& shape, const std::map<std::string, int64_t>& sizes) {
  std::vector<int64_t> found;
  for (const Extent& extent : shape) {
    const Size* size = size_of(extent);
    const auto* fixed = std::get_if<int64_t>(&extent);
    found.push_back(size ? size_at(*size, sizes.at(size->dimension)) : fixed ? *fixed : kAnySize);
  }
  return found;
}

std::string kind_text(std::string_view dtype, const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(size == kAnySize ? "*" : std::to_string(size));
  return concat(dtype, "[", joined(sizes), "]");
}

bool is_floating(std::string_view dtype) { return dtype.starts_with("float") || dtype == "bfloat16"; }

const Method* method_of(const Manifest& manifest, std::string_view name) {
  for (const Method& method : manifest.methods) {
    if (method.name == name) return &method;
  }
  return nullptr;
}

const Method* default_method(const Manifest& manifest) {
  if (const Method* forward = method_of(manifest, kForward)) return forward;
  return manifest.methods.size() == 1 ? manifest.methods.data() : nullptr;
}

std::string code_folder(std::string_view target, std::string_view method) {
  return method == kForward ? std::string(target) : std::string(method) + "." + std::string(target);
}

void check_manifest_size(uint64_t bytes) {
  if (bytes <= kMaxManifestBytes) return;
  throw Error(errors::kManifestTooLarge,
              concat("the manifest has ", bytes, " bytes; at most ", kMaxManifestBytes, " are read"));
}

std::vector<Target> decode_targets(std::string_view json) { return decode_part(json, list(target)); }
std::vector<Weight> decode_weights(std::string_view json) { return decode_part(json, list(weight)); }
std::vector<StateTensor> decode_state(std::string_view json) { return decode_part(json, list(state_tensor)); }
Library decode_library(std::string_view json) { return decode_part(json, library); }
std::vector<Library> decode_libraries(std::string_view json) { return decode_part(json, list(library)); }

Manifest decode_manifest(std::string_view text) {
  try {
    JsonReader json(text, kMaxManifestDepth);
    survey(json);
    return manifest(json);
  } catch (const JsonError& error) {
    throw Error(errors::kManifestSyntax,
                std::string("the manifest is not JSON as FORMAT.md defines it: ") + error.what(),
                "exportkit refuses keys and values that it does not know, because it cannot follow them.");
  }
}

}  // namespace exportkit
