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
  if (value < least || value > most) {
    json.fail("expected an integer from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
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
  const auto allowed = [](char c) { return is_alnum(c) || c == '_'; };
  if (value.empty() || value.size() > 64 || is_digit(value[0]) || !std::all_of(value.begin(), value.end(), allowed)) {
    json.fail("expected 1 to 64 letters, digits and _, starting with a letter or _, found " + shown(value));
  }
  return value;
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

Constant constant(JsonReader& json) {
  switch (json.peek()) {
    case JsonReader::Kind::kNull:
      json.null();
      return std::monostate{};
    case JsonReader::Kind::kBool:
      return json.boolean();
    case JsonReader::Kind::kString:
      return json.string();
    case JsonReader::Kind::kNumber:
      if (json.at_integer()) return json.integer();
      return json.number();
    default:
      json.fail("expected null, true, false, a number or a string");
  }
}

constexpr auto device = one_of("cpu", "cuda");

// --- objects -------------------------------------------------------------------------------------------------------

constexpr auto dimension =
    object(field("name", &Dimension::name, symbol), field("min", &Dimension::min, count),
           field("max", &Dimension::max, count), optional_field("tried", &Dimension::tried, list(count)));

Extent extent(JsonReader& json) {
  if (json.peek() != JsonReader::Kind::kObject) return count(json);
  return object(field("dimension", &Size::dimension, symbol), field("scale", &Size::scale, scale),
                field("offset", &Size::offset, integer))(json);
}

constexpr auto gradient_of =
    object(field("output", &GradientOf::output, text), field("input", &GradientOf::input, text),
           field("scale", &GradientOf::scale, number));

constexpr auto output_tolerance =
    object(field("rtol", &OutputTolerance::rtol, not_negative), field("atol", &OutputTolerance::atol, not_negative),
           field("ranking_of", &OutputTolerance::ranking_of, nullable(text)),
           field("rows_of", &OutputTolerance::rows_of, nullable(text)),
           optional_field("gradient_of", &OutputTolerance::gradient_of, gradient_of));

constexpr auto tensor_input = object(field("name", &TensorInput::name, text), field("dtype", &TensorInput::dtype, text),
                                     field("shape", &TensorInput::shape, list(extent)),
                                     field("written", &TensorInput::written, nullable(output_tolerance)));

constexpr auto tensor_output =
    object(field("name", &TensorOutput::name, text), field("dtype", &TensorOutput::dtype, text),
           field("shape", &TensorOutput::shape, list(nullable(extent))),
           field("tolerance", &TensorOutput::tolerance, output_tolerance));

// The type may come last, after a nested tree as large as the manifest. So all fields are read in one pass, before the
// type is known.
Node node(JsonReader& json) {
  enum : uint32_t {
    kType = 1,
    kIndex = 2,
    kValue = 4,
    kKind = 8,
    kKeys = 16,
    kClassName = 32,
    kFields = 64,
    kItems = 128
  };
  std::string type;
  TensorNode tensor{};
  ConstantNode constant_node;
  SequenceNode sequence;
  MappingNode mapping;
  NamedTupleNode tuple;
  std::vector<Node> items;
  const uint32_t found =
      fields(json, field("type", type, text), optional_field("index", tensor.index, count),
             optional_field("value", constant_node.value, constant),
             optional_field("kind", sequence.kind, one_of("list", "tuple")),
             optional_field("keys", mapping.keys, list(text)), optional_field("class_name", tuple.class_name, text),
             optional_field("fields", tuple.fields, list(text)), optional_field("items", items, list(node)));
  const auto is = [&](const char* name, uint32_t keys) { return type == name && found == (kType | keys); };
  if (is("tensor", kIndex)) return {tensor};
  if (is("constant", kValue)) return {std::move(constant_node)};
  if (is("sequence", kKind | kItems)) {
    sequence.items = std::move(items);
    return {std::move(sequence)};
  }
  if (is("mapping", kKeys | kItems)) {
    mapping.items = std::move(items);
    return {std::move(mapping)};
  }
  if (is("namedtuple", kClassName | kFields | kItems)) {
    tuple.items = std::move(items);
    return {std::move(tuple)};
  }
  json.fail("node of type " + shown(type) + ", which is unknown or has other keys");
}

constexpr auto parameter =
    object(field("name", &Parameter::name, text), field("kind", &Parameter::kind, one_of("positional", "keyword")),
           field("value", &Parameter::value, node));

constexpr auto call =
    object(field("parameters", &Call::parameters, list(parameter)), field("inputs", &Call::inputs, list(tensor_input)),
           field("result", &Call::result, node), field("outputs", &Call::outputs, list(tensor_output)),
           field("dimensions", &Call::dimensions, list(dimension)));

constexpr auto state_tensor =
    object(field("name", &StateTensor::name, text), field("aliases", &StateTensor::aliases, list(text)),
           field("dtype", &StateTensor::dtype, text), field("shape", &StateTensor::shape, list(extent)),
           field("initial", &StateTensor::initial, nullable(text)),
           field("tolerance", &StateTensor::tolerance, output_tolerance));

constexpr auto state_use =
    object(field("index", &StateUse::index, count), field("written", &StateUse::written, boolean));

constexpr auto method = object(field("name", &Method::name, text), field("call", &Method::call, call),
                               field("state", &Method::state, list(state_use)));

constexpr auto target =
    object(field("name", &Target::name, name), field("device", &Target::device, device),
           field("platform", &Target::platform, name), field("cpu_isa", &Target::cpu_isa, nullable(text)),
           field("cuda_architecture", &Target::cuda_architecture, nullable(text)),
           field("cuda_ptx", &Target::cuda_ptx, boolean), field("needs_torch", &Target::needs_torch, text),
           field("built_with_torch", &Target::built_with_torch, text),
           field("built_with_cuda", &Target::built_with_cuda, nullable(text)),
           field("constants", &Target::constants, object_of(object_of(text))));

constexpr auto weight =
    object(field("name", &Weight::name, text), field("aliases", &Weight::aliases, list(text)),
           field("state", &Weight::state, boolean), field("dtype", &Weight::dtype, text),
           field("shape", &Weight::shape, list(count)), field("strides", &Weight::strides, list(count)),
           field("record", &Weight::record, nullable(text)));

constexpr auto program =
    object(field("records", &Program::records, object_of(text)), field("device", &Program::device, device),
           field("built_with_torch", &Program::built_with_torch, text));

constexpr auto onnx_data = object(field("name", &OnnxData::name, file_name), field("size", &OnnxData::size, count),
                                  field("sha256", &OnnxData::sha256, sha256));

constexpr auto onnx_function =
    object(field("operator", &OnnxFunction::op, text), field("domain", &OnnxFunction::domain, text),
           field("name", &OnnxFunction::name, text), field("overload", &OnnxFunction::overload, text));

constexpr auto onnx =
    object(field("method", &Onnx::method, text), field("size", &Onnx::size, count),
           field("sha256", &Onnx::sha256, sha256), field("data", &Onnx::data, nullable(onnx_data)),
           field("opset", &Onnx::opset, opset), field("functions", &Onnx::functions, list(onnx_function)));

constexpr auto operator_ = object(field("name", &Operator::name, text), field("schema", &Operator::schema, text));

constexpr auto library =
    object(field("record", &Library::record, text), field("sha256", &Library::sha256, sha256),
           field("platform", &Library::platform, name), field("device", &Library::device, device),
           field("kernels", &Library::kernels, list(one_of("cpu", "cuda", "any"))),
           field("defines", &Library::defines, list(operator_)), field("needs_torch", &Library::needs_torch, text),
           field("torch_bound", &Library::torch_bound, nullable(text)), field("needs", &Library::needs, list(text)),
           optional_field("adds_to", &Library::adds_to, list(text)));

std::vector<std::pair<std::string, int64_t>> sizes(JsonReader& json) {
  std::vector<std::pair<std::string, int64_t>> out;
  json.object([&](std::string_view key) {
    std::string checked = checked_symbol(json, std::string(key));
    out.emplace_back(std::move(checked), count(json));
  });
  return out;
}

constexpr auto accuracy =
    object(field("rms", &Accuracy::rms, not_negative), field("greatest", &Accuracy::greatest, not_negative));

constexpr auto case_call = object(field("method", &CaseCall::method, text), field("sizes", &CaseCall::sizes, sizes),
                                  field("accuracy", &CaseCall::accuracy, object_of(nullable(accuracy))));

constexpr auto case_ = object(field("record", &Case::record, text), field("calls", &Case::calls, list(case_call)),
                              field("reference_dtype", &Case::reference_dtype, nullable(one_of("float64", "float32"))),
                              field("state_accuracy", &Case::state_accuracy, object_of(nullable(accuracy))));

constexpr auto source = object(field("model", &Source::model, nullable(text)),
                               field("model_kwargs", &Source::model_kwargs, object_of(constant)),
                               field("dtype", &Source::dtype, nullable(text)), field("seed", &Source::seed, integer),
                               field("state_sha256", &Source::state_sha256, sha256));

constexpr auto provenance =
    object(field("exportkit", &Provenance::exportkit, text), field("torch", &Provenance::torch, text),
           field("commit", &Provenance::commit, nullable(text)), field("dirty", &Provenance::dirty, nullable(boolean)),
           field("tf32", &Provenance::tf32, boolean));

constexpr auto record = object(field("name", &Record::name, text), field("size", &Record::size, count),
                               field("sha256", &Record::sha256, sha256));

constexpr auto manifest =
    object(field("format_version", &Manifest::format_version, integer), field("name", &Manifest::name, name),
           field("version", &Manifest::version, text), field("methods", &Manifest::methods, list(method)),
           field("state", &Manifest::state, list(state_tensor)), field("targets", &Manifest::targets, list(target)),
           field("weights", &Manifest::weights, list(weight)), field("program", &Manifest::program, nullable(program)),
           field("onnx", &Manifest::onnx, list(onnx)), field("operators", &Manifest::operators, list(operator_)),
           field("libraries", &Manifest::libraries, list(library)), field("cases", &Manifest::cases, list(case_)),
           field("source", &Manifest::source, source), field("provenance", &Manifest::provenance, provenance),
           field("records", &Manifest::records, list(record)));

// --- the whole manifest --------------------------------------------------------------------------------------------

// Checks the syntax of the whole text first. Then reads the version, since other versions may have other keys.
void survey(const JsonReader& start) {
  JsonReader whole = start;
  whole.skip();
  whole.end();
  JsonReader json = start;
  if (json.peek() != JsonReader::Kind::kObject || !json.seek("format_version") ||
      json.peek() != JsonReader::Kind::kNumber || !json.at_integer()) {
    throw JsonError("it is not an object with an integer `format_version`");
  }
  const std::string_view version = json.number_text();
  if (version != std::to_string(kFormatVersion)) {
    const bool newer = version[0] != '-' && version[0] != '0';
    throw Error(errors::kFormatVersion,
                "the package has format version " + std::string(version.substr(0, 40)) + "; this exportkit reads " +
                    std::to_string(kFormatVersion),
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
  throw Error(errors::kManifestTooLarge, "the manifest has " + std::to_string(bytes) + " bytes; at most " +
                                             std::to_string(kMaxManifestBytes) + " are read");
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
