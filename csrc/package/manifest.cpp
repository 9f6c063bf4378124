#include "package/manifest.h"

#include <algorithm>
#include <limits>

#include "package/errors.h"
#include "package/json.h"
#include "package/manifest_fields.h"
#include "package/text.h"

namespace exportkit {

namespace {

constexpr int64_t kMaxCount = int64_t{1} << 62;

// --- values --------------------------------------------------------------------------------------------------------

bool is_alnum(char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

std::string text(JsonReader& json) { return json.string(); }
bool boolean(JsonReader& json) { return json.boolean(); }
int64_t integer(JsonReader& json) { return json.integer(); }

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
  if (value.empty() || value.size() > 64 || (value[0] >= '0' && value[0] <= '9') ||
      !std::all_of(value.begin(), value.end(), allowed)) {
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

std::string sha256(JsonReader& json) { return json.sha256(); }

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

const auto device = one_of("cpu", "cuda");

// --- objects -------------------------------------------------------------------------------------------------------

Dimension dimension(JsonReader& json) {
  Dimension out;
  fields(json, field("name", out.name, symbol), field("min", out.min, count), field("max", out.max, count));
  return out;
}

Extent extent(JsonReader& json) {
  if (json.peek() != JsonReader::Kind::kObject) return count(json);
  Size out;
  fields(json, field("dimension", out.dimension, symbol), field("scale", out.scale, scale),
         field("offset", out.offset, integer));
  return out;
}

GradientOf gradient_of(JsonReader& json) {
  GradientOf out;
  fields(json, field("output", out.output, text), field("input", out.input, text),
         field("scale", out.scale, [](JsonReader& json) { return json.number(); }));
  return out;
}

OutputTolerance output_tolerance(JsonReader& json) {
  OutputTolerance out;
  fields(json, field("rtol", out.rtol, not_negative), field("atol", out.atol, not_negative),
         field("ranking_of", out.ranking_of, nullable(text)), field("rows_of", out.rows_of, nullable(text)),
         optional_field("gradient_of", out.gradient_of, gradient_of));
  return out;
}

TensorInput tensor_input(JsonReader& json) {
  TensorInput out;
  fields(json, field("name", out.name, text), field("dtype", out.dtype, text), field("shape", out.shape, list(extent)),
         field("written", out.written, nullable(output_tolerance)));
  return out;
}

TensorOutput tensor_output(JsonReader& json) {
  TensorOutput out;
  fields(json, field("name", out.name, text), field("dtype", out.dtype, text),
         field("shape", out.shape, list(nullable(extent))), field("tolerance", out.tolerance, output_tolerance));
  return out;
}

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

Parameter parameter(JsonReader& json) {
  Parameter out;
  fields(json, field("name", out.name, text), field("kind", out.kind, one_of("positional", "keyword")),
         field("value", out.value, node));
  return out;
}

Call call(JsonReader& json) {
  Call out;
  fields(json, field("parameters", out.parameters, list(parameter)), field("inputs", out.inputs, list(tensor_input)),
         field("result", out.result, node), field("outputs", out.outputs, list(tensor_output)),
         field("dimensions", out.dimensions, list(dimension)));
  return out;
}

StateTensor state_tensor(JsonReader& json) {
  StateTensor out;
  fields(json, field("name", out.name, text), field("aliases", out.aliases, list(text)),
         field("dtype", out.dtype, text), field("shape", out.shape, list(extent)),
         field("initial", out.initial, nullable(text)), field("tolerance", out.tolerance, output_tolerance));
  return out;
}

StateUse state_use(JsonReader& json) {
  StateUse out;
  fields(json, field("index", out.index, count), field("written", out.written, boolean));
  return out;
}

Method method(JsonReader& json) {
  Method out;
  fields(json, field("name", out.name, text), field("call", out.call, call),
         field("state", out.state, list(state_use)));
  return out;
}

Target target(JsonReader& json) {
  Target out;
  fields(json, field("name", out.name, name), field("device", out.device, device),
         field("platform", out.platform, name), field("cpu_isa", out.cpu_isa, nullable(text)),
         field("cuda_architecture", out.cuda_architecture, nullable(text)), field("cuda_ptx", out.cuda_ptx, boolean),
         field("needs_torch", out.needs_torch, text), field("built_with_torch", out.built_with_torch, text),
         field("built_with_cuda", out.built_with_cuda, nullable(text)),
         field("constants", out.constants, object_of(object_of(text))));
  return out;
}

Weight weight(JsonReader& json) {
  Weight out;
  fields(json, field("name", out.name, text), field("aliases", out.aliases, list(text)),
         field("state", out.state, boolean), field("dtype", out.dtype, text), field("shape", out.shape, list(count)),
         field("strides", out.strides, list(count)), field("record", out.record, nullable(text)));
  return out;
}

Program program(JsonReader& json) {
  Program out;
  fields(json, field("records", out.records, object_of(text)), field("device", out.device, device),
         field("built_with_torch", out.built_with_torch, text));
  return out;
}

OnnxData onnx_data(JsonReader& json) {
  OnnxData out;
  fields(json, field("name", out.name, file_name), field("size", out.size, count), field("sha256", out.sha256, sha256));
  return out;
}

OnnxFunction onnx_function(JsonReader& json) {
  OnnxFunction out;
  fields(json, field("operator", out.op, text), field("domain", out.domain, text), field("name", out.name, text),
         field("overload", out.overload, text));
  return out;
}

Onnx onnx(JsonReader& json) {
  Onnx out;
  fields(json, field("method", out.method, text), field("size", out.size, count), field("sha256", out.sha256, sha256),
         field("data", out.data, nullable(onnx_data)), field("opset", out.opset, opset),
         field("functions", out.functions, list(onnx_function)));
  return out;
}

Operator operator_(JsonReader& json) {
  Operator out;
  fields(json, field("name", out.name, text), field("schema", out.schema, text));
  return out;
}

Library library(JsonReader& json) {
  Library out;
  fields(json, field("record", out.record, text), field("sha256", out.sha256, sha256),
         field("platform", out.platform, name), field("device", out.device, device),
         field("kernels", out.kernels, list(one_of("cpu", "cuda", "any"))),
         field("defines", out.defines, list(operator_)), field("needs_torch", out.needs_torch, text),
         field("torch_bound", out.torch_bound, nullable(text)), field("needs", out.needs, list(text)),
         optional_field("adds_to", out.adds_to, list(text)));
  return out;
}

std::vector<std::pair<std::string, int64_t>> sizes(JsonReader& json) {
  std::vector<std::pair<std::string, int64_t>> out;
  json.object([&](std::string_view key) {
    std::string checked = checked_symbol(json, std::string(key));
    out.emplace_back(std::move(checked), count(json));
  });
  return out;
}

Accuracy accuracy(JsonReader& json) {
  Accuracy out;
  fields(json, field("rms", out.rms, not_negative), field("greatest", out.greatest, not_negative));
  return out;
}

CaseCall case_call(JsonReader& json) {
  CaseCall out;
  fields(json, field("method", out.method, text), field("sizes", out.sizes, sizes),
         field("accuracy", out.accuracy, object_of(nullable(accuracy))));
  return out;
}

Case case_(JsonReader& json) {
  Case out;
  fields(json, field("record", out.record, text), field("calls", out.calls, list(case_call)),
         field("reference_dtype", out.reference_dtype, nullable(one_of("float64", "float32"))),
         field("state_accuracy", out.state_accuracy, object_of(nullable(accuracy))));
  return out;
}

Source source(JsonReader& json) {
  Source out;
  fields(json, field("model", out.model, nullable(text)), field("model_kwargs", out.model_kwargs, object_of(constant)),
         field("dtype", out.dtype, nullable(text)), field("seed", out.seed, integer),
         field("state_sha256", out.state_sha256, sha256));
  return out;
}

Provenance provenance(JsonReader& json) {
  Provenance out;
  fields(json, field("exportkit", out.exportkit, text), field("torch", out.torch, text),
         field("commit", out.commit, nullable(text)), field("dirty", out.dirty, nullable(boolean)),
         field("tf32", out.tf32, boolean));
  return out;
}

Record record(JsonReader& json) {
  Record out;
  fields(json, field("name", out.name, text), field("size", out.size, count), field("sha256", out.sha256, sha256));
  return out;
}

Manifest manifest(JsonReader& json) {
  Manifest out;
  fields(json, field("format_version", out.format_version, integer), field("name", out.name, name),
         field("version", out.version, text), field("methods", out.methods, list(method)),
         field("state", out.state, list(state_tensor)), field("targets", out.targets, list(target)),
         field("weights", out.weights, list(weight)), field("program", out.program, nullable(program)),
         field("onnx", out.onnx, list(onnx)), field("operators", out.operators, list(operator_)),
         field("libraries", out.libraries, list(library)), field("cases", out.cases, list(case_)),
         field("source", out.source, source), field("provenance", out.provenance, provenance),
         field("records", out.records, list(record)));
  return out;
}

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
  JsonReader json(text, kMaxManifestDepth);
  JsonReader whole = json;
  whole.skip();
  whole.end();
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
