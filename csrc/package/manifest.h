// The manifest, a package's description of itself. exportkit/package/FORMAT.md explains every key. Python decodes a
// checked manifest into classes with the same names and order (exportkit/package/manifest.py). What only Python uses is
// checked, and not kept here.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace exportkit {

inline constexpr int64_t kFormatVersion = 1;  // the only version
inline constexpr size_t kMaxManifestBytes = size_t{16} << 20;
inline constexpr int64_t kMinOpset = 18;  // of ONNX
inline constexpr int64_t kMaxOpset = 23;
inline constexpr int kMaxManifestDepth = 80;             // of brackets
inline constexpr std::string_view kForward = "forward";  // the method that a call without a name means
inline constexpr std::string_view kManifestName = "exportkit/manifest.json";

// A named number that varies from call to call: min <= n <= max.
struct Dimension {
  std::string name;
  int64_t min, max;
  std::vector<int64_t> tried;  // where a condition on sizes begins or ends to hold; `verify` draws them, too
};

// scale * dimension + offset.
struct Size {
  std::string dimension;
  int64_t scale = 1;
  int64_t offset = 0;
  bool operator==(const Size&) const = default;
};

// A number, or what varies with a dimension; nothing for an output's size that does not depend on one dimension alone.
using Extent = std::variant<int64_t, Size, std::monostate>;

// `scale` times the gradient of the sum of an output with respect to an input.
struct GradientOf {
  std::string output, input;
  double scale;
};

struct OutputTolerance {
  double rtol, atol;
  std::optional<std::string> ranking_of, rows_of;
  std::optional<int64_t> dim;  // of what `ranking_of` names; absent for the last
  std::optional<GradientOf> gradient_of;
};

// A tensor that the compiled code takes. `name` is its place in the call, such as `image` or `batch.mask`. `written` is
// the tolerance of what the call writes into it, if it does.
struct TensorInput {
  std::string name, dtype;
  std::vector<Extent> shape;
  std::optional<OutputTolerance> written;
};

// A tensor that the compiled code returns.
struct TensorOutput {
  std::string name, dtype;
  std::vector<Extent> shape;
  OutputTolerance tolerance;
};

// A value, or several.
struct Node {
  std::string type;               // "tensor", "constant", "sequence", "mapping" or "namedtuple"
  int64_t index = 0;              // of a tensor in `inputs` or `outputs`
  std::vector<std::string> keys;  // of a mapping, in order; the fields of a named tuple
  std::string class_name;         // of a named tuple
  std::vector<Node> items;
};

// A parameter of the module's forward that had a value at export, with that value's structure.
struct Parameter {
  std::string name, kind;  // "positional" or "keyword"
  Node value;
};

// The module's call signature and output structure, over flat lists of tensors.
struct Call {
  std::vector<Parameter> parameters;
  std::vector<TensorInput> inputs;
  Node result;
  std::vector<TensorOutput> outputs;
  std::vector<Dimension> dimensions;
};

// A tensor that methods write and that outlives a call. A session has one of its own, which begins with the elements
// of the record `initial`, or with zeros. At a size that is a Size, the record has one row, which all rows begin with.
struct StateTensor {
  std::string name;
  std::vector<std::string> aliases;  // other names of the same buffer
  std::string dtype;
  std::vector<Extent> shape;
  std::optional<std::string> initial;
  OutputTolerance tolerance;
};

// A tensor of the manifest's `state` that a method's code takes after its inputs.
struct StateUse {
  int64_t index;
  bool written;
};

// One entry of the model. Its code takes the inputs of the call, then this state.
struct Method {
  std::string name;
  Call call;
  std::vector<StateUse> state;
};

// One compiled model: code_folder(target, method) under data/aotinductor/ for each method.
struct Target {
  std::string name, device, platform;  // device is "cpu" or "cuda"
  std::optional<std::string> cpu_isa, cuda_architecture;
  bool cuda_ptx;
  std::string needs_torch, built_with_torch;
  std::optional<std::string> built_with_cuda;
  // By method, every tensor that the code takes from outside: AOTInductor's name and the weight's name.
  std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> constants;
};

// A tensor of the model's state, or a constant that the targets' code reads (`state` is false). Its elements lie in
// `record` without gaps, `strides` apart. A tensor that no code reads has no record.
struct Weight {
  std::string name;
  std::vector<std::string> aliases;  // other names of the same tensor
  bool state;
  std::string dtype;
  std::vector<int64_t> shape, strides;
  std::optional<std::string> record;
};

// The ExportedPrograms, a record for each method, from which the package can be compiled again.
struct Program {
  std::vector<std::pair<std::string, std::string>> records;
  std::string built_with_torch;
};

// The ONNX function that computes a custom operator of the graph. An operator has several if dtypes or attributes
// differ.
struct OnnxFunction {
  std::string op, domain, name, overload;
};

// An ONNX model that this package stands beside.
struct Onnx {
  std::string method;
  std::vector<OnnxFunction> functions;
};

// A custom operator of the graph, `namespace::name` or `namespace::name.overload`, with its full schema.
struct Operator {
  std::string name, schema;
};

// An operator library, under exportkit/ops/<platform>/.
struct Library {
  std::string record, sha256, platform, device;
  std::vector<Operator> defines;
  std::string needs_torch;
  std::optional<std::string> torch_bound;
  std::vector<std::string> needs;
  std::vector<std::string> adds_to;       // operators that it adds kernels to without defining them
  std::vector<std::string> attestations;  // records of in-toto statements about it
};

// How far an output is from its reference, relative to the reference's magnitude: accuracy.h.
struct Accuracy {
  double rms = 0, greatest = 0;
};

// By name, eager's error, or nothing for an output that ranks another.
using Accuracies = std::vector<std::pair<std::string, std::optional<Accuracy>>>;

// One recorded call of a method. What it writes into an input has the name `written.<input>` in `accuracy`.
struct CaseCall {
  std::string method;
  std::vector<std::pair<std::string, int64_t>> sizes;  // by dimension, in the file's order
  Accuracies accuracy;
};

// A recorded sequence of calls in one session. Tensors: `<call>.input.<i>`, `<call>.output.<i>`,
// `<call>.reference.<i>`, `<call>.written.<i>` and `<call>.written_reference.<i>` for inputs that are written, and
// after the last call `state.<j>` and `state_reference.<j>`, of the whole state or none.
struct Case {
  std::string record;
  std::vector<CaseCall> calls;
  std::optional<std::string> reference_dtype;  // what the references were computed in
  Accuracies state_accuracy;                   // by the state's name
};

// The software that built the package.
struct Provenance {
  bool tf32;
};

// A record of the archive other than the manifest.
struct Record {
  std::string name;
  int64_t size;
  std::string sha256;
};

struct Manifest {
  int64_t format_version;
  std::string name, version;
  std::vector<Method> methods;
  std::vector<StateTensor> state;
  std::vector<Target> targets;
  std::vector<Weight> weights;
  std::optional<Program> program;
  std::vector<Onnx> onnx;  // one for each method, or none
  std::vector<Operator> operators;
  std::vector<Library> libraries;
  std::vector<Case> cases;
  Provenance provenance;
  std::vector<Record> records;
};

inline const Size* size_of(const Extent& extent) { return std::get_if<Size>(&extent); }
// The rows of a state: its first size, if that varies; else null.
inline const Size* rows_of(const StateTensor& state) {
  return state.shape.empty() ? nullptr : size_of(state.shape.front());
}
// The value of a size if its dimension has this number. If it does not fit in an int64_t, the nearest int64_t, which no
// tensor's size has.
int64_t size_at(const Size& size, int64_t number);
// A tensor's sizes where the dimensions have these numbers; kAnySize for what does not depend on one dimension alone.
inline constexpr int64_t kAnySize = -1;
std::vector<int64_t> shape_at(const std::vector<Extent>& shape, const std::map<std::string, int64_t>& sizes);
// Such as "float32[2, 3]", with * for kAnySize.
std::string kind_text(std::string_view dtype, const std::vector<int64_t>& shape);
// Whether the elements of this dtype are real numbers in floating point.
bool is_floating(std::string_view dtype);

// The method of this name, or null.
const Method* method_of(const Manifest& manifest, std::string_view name);
// The method that a call without a name means: `forward`, or the only one; null if there are several others.
const Method* default_method(const Manifest& manifest);
// The folder of a method's code under data/aotinductor/: the target's name, if the method is `forward`.
std::string code_folder(std::string_view target, std::string_view method);

// Throws ManifestTooLargeError.
void check_manifest_size(uint64_t bytes);

// Read single parts of a manifest, as JSON lists or objects: JsonError.
std::vector<Target> decode_targets(std::string_view json);
std::vector<Weight> decode_weights(std::string_view json);
std::vector<StateTensor> decode_state(std::string_view json);
Library decode_library(std::string_view json);
std::vector<Library> decode_libraries(std::string_view json);

// Reads a manifest strictly: FormatVersionError or ManifestSyntaxError. consistency.h checks that its parts agree.
Manifest decode_manifest(std::string_view json);

}  // namespace exportkit
