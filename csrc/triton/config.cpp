#include "triton/config.h"

#include <algorithm>
#include <charconv>
#include <span>

#include "package/json_fields.h"
#include "package/text.h"
#include "triton/errors.h"

namespace exportkit::triton {
namespace {

// --- reading ---------------------------------------------------------------------------------------------------------

// Triton writes some integers of 64 bits as text, as protobuf does.
int64_t whole(JsonReader& json) {
  if (json.peek() != JsonReader::Kind::kString) return json.integer();
  const std::string text = json.string();
  int64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc{})
    json.fail("expected an integer");
  return value;
}

std::vector<int64_t> integers(JsonReader& json) { return list(whole)(json); }

// The sizes that the backend gets are those of `reshape`, where there is one.
GivenTensor read_tensor(JsonReader& json) {
  GivenTensor tensor;
  std::optional<std::vector<int64_t>> reshaped;
  read_known(json, {{"name", [&] { tensor.name = json.string(); }},
                    {"data_type", [&] { tensor.dtype = json.string(); }},
                    {"dims", [&] { tensor.dims = integers(json); }},
                    {"reshape", [&] {
                       read_known(json, {{"shape", [&, &sizes = reshaped.emplace()] { sizes = integers(json); }}});
                     }}});
  if (reshaped) tensor.dims = *reshaped;
  return tensor;
}

void read_tensors(JsonReader& json, std::vector<GivenTensor>& tensors, std::string_view& text) {
  JsonReader again = json;
  text = again.skipped();
  tensors = list(read_tensor)(json);
}

void read_parameters(JsonReader& json, std::map<std::string, std::string>& parameters) {
  json.object([&](std::string_view name) {
    std::string& value = parameters[std::string(name)];
    read_known(json, {{"string_value", [&] { value = json.string(); }}});
  });
}

void read_group(JsonReader& json, std::map<std::string, int64_t>& instances) {
  std::string kind;
  int64_t count = 1;
  std::vector<int64_t> gpus;
  read_known(json, {{"kind", [&] { kind = json.string(); }},
                    {"count", [&] { count = whole(json); }},
                    {"gpus", [&] { gpus = integers(json); }}});
  if (kind != "KIND_GPU") {
    instances[kind == "KIND_CPU" ? "cpu" : "auto"] += count;
    return;
  }
  for (const int64_t gpu : gpus) instances["cuda:" + std::to_string(gpu)] += count;
}

// Whether a state of config.pbtxt is the one that the backend needs.
bool is_session(JsonReader& json) {
  std::string input, output, dtype;
  std::vector<int64_t> dims;
  read_known(json, {{"input_name", [&] { input = json.string(); }},
                    {"output_name", [&] { output = json.string(); }},
                    {"data_type", [&] { dtype = json.string(); }},
                    {"dims", [&] { dims = integers(json); }}});
  return input == kState && output == kState && dtype == "TYPE_UINT8" && dims == std::vector<int64_t>{kStateBytes};
}

void read_sequences(JsonReader& json, SequenceBatching& found) {
  found.given = true;
  const auto read_oldest = [&] {
    found.oldest = true;
    read_known(json, {{"max_candidate_sequences", [&] { found.candidates = whole(json); }}});
  };
  const auto read_states = [&] { json.array([&] { found.state = is_session(json) || found.state; }); };
  read_known(json, {{"max_sequence_idle_microseconds", [&] { found.idle_microseconds = whole(json); }},
                    {"oldest", read_oldest},
                    {"state", read_states}});
  constexpr int64_t kSecond = 1'000'000, kYear = 366 * 86'400 * kSecond;
  if (found.idle_microseconds <= 0) found.idle_microseconds = kSecond;  // as Triton takes 0
  found.idle_microseconds = std::min(found.idle_microseconds, kYear);
  if (found.candidates <= 0) found.candidates = SequenceBatching().candidates;
}

// --- checking --------------------------------------------------------------------------------------------------------

std::string state_config() {
  return concat(R"({"input_name":")", kState, R"(","output_name":")", kState, R"(","data_type":"TYPE_UINT8","dims":[)",
                kStateBytes, "]}");
}

void check_sequences(const ModelConfig& config, const Served& served) {
  const bool stateful = served.method->stateful != 0;
  const std::string name = std::string("the method `") + served.method->name + "`";
  if (!stateful && config.sequences.given) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt has sequence_batching, and ", name,
                  " has no state. Leave it out.");
  }
  if (stateful && config.dynamic_batching) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt has dynamic_batching, and ", name,
                  " has state, which needs sequence_batching. Leave it out.");
  }
  if (config.sequences.given && !(config.sequences.oldest && config.sequences.state)) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "sequence_batching of config.pbtxt must have oldest { } and state [ { input_name: \"", kState,
                  "\" output_name: \"", kState, "\" data_type: TYPE_UINT8 dims: [ ", kStateBytes,
                  " ] } ], in which the backend keeps a sequence's session. Add them, or leave sequence_batching out.");
  }
}

struct Dtype {
  std::string_view package, config;
  TRITONSERVER_DataType triton;
};

constexpr Dtype kDtypes[] = {
    {"bool", "TYPE_BOOL", TRITONSERVER_TYPE_BOOL},       {"uint8", "TYPE_UINT8", TRITONSERVER_TYPE_UINT8},
    {"uint16", "TYPE_UINT16", TRITONSERVER_TYPE_UINT16}, {"uint32", "TYPE_UINT32", TRITONSERVER_TYPE_UINT32},
    {"uint64", "TYPE_UINT64", TRITONSERVER_TYPE_UINT64}, {"int8", "TYPE_INT8", TRITONSERVER_TYPE_INT8},
    {"int16", "TYPE_INT16", TRITONSERVER_TYPE_INT16},    {"int32", "TYPE_INT32", TRITONSERVER_TYPE_INT32},
    {"int64", "TYPE_INT64", TRITONSERVER_TYPE_INT64},    {"float16", "TYPE_FP16", TRITONSERVER_TYPE_FP16},
    {"float32", "TYPE_FP32", TRITONSERVER_TYPE_FP32},    {"float64", "TYPE_FP64", TRITONSERVER_TYPE_FP64},
    {"bfloat16", "TYPE_BF16", TRITONSERVER_TYPE_BF16},
};

const Dtype& dtype_of(const exportkit_tensor_info& tensor) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.package == tensor.dtype) return dtype;
  }
  throw Failure(TRITONSERVER_ERROR_UNSUPPORTED, "`", tensor.name, "` is ", tensor.dtype,
                ", which Triton's protocol does not have");
}

bool fixed(const exportkit_size_range& size) { return size.min == size.max && size.min > 0; }

std::string shown(const std::vector<int64_t>& dims) {
  std::vector<std::string> parts;
  for (const int64_t size : dims) parts.push_back(std::to_string(size));
  return "[" + joined(parts) + "]";
}

// The sizes that the configuration has; -1 varies. A scalar has none: Triton's least is [1], of which the reshape of a
// batch makes a scalar for each row.
std::vector<int64_t> dims_of(const exportkit_tensor_info& tensor, bool batched) {
  std::vector<int64_t> dims;
  for (int32_t axis = batched ? 1 : 0; axis < tensor.ndim; ++axis) {
    dims.push_back(fixed(*tensor.shape[axis]) ? tensor.shape[axis]->min : -1);
  }
  if (dims.empty() && !batched) dims.push_back(1);
  return dims;
}

std::string tensor_config(const exportkit_tensor_info& tensor, bool batched) {
  if (*tensor.name == '\0') throw Failure(TRITONSERVER_ERROR_UNSUPPORTED, "a tensor has no name, which Triton demands");
  const std::vector<int64_t> dims = dims_of(tensor, batched);
  JsonMembers members = {{"name", json_text(tensor.name)},
                         {"data_type", json_text(dtype_of(tensor).config)},
                         {"dims", dims.empty() ? "[1]" : shown(dims)}};
  if (dims.empty()) members.emplace_back("reshape", R"({"shape":[]})");
  return json_object(members);
}

// Whether sizes of config.pbtxt are some of those that the package has.
bool within(const std::vector<int64_t>& given, const exportkit_tensor_info& tensor, bool batched) {
  const std::vector<int64_t> dims = dims_of(tensor, batched);
  if (given.size() != dims.size()) return false;
  if (tensor.ndim == 0) return given == dims;
  for (size_t i = 0; i < given.size(); ++i) {
    const exportkit_size_range& size = *tensor.shape[i + (batched ? 1 : 0)];
    const bool inside =
        given[i] >= size.min && given[i] <= size.max && (size.step <= 1 || (given[i] - size.min) % size.step == 0);
    if (given[i] != -1 && size.max > 0 && !inside) return false;
  }
  return true;
}

using TensorInfos = std::span<const exportkit_tensor_info* const>;

// `batched`: the first size is the rows of a batch, which the configuration does not have.
std::string tensors_config(TensorInfos tensors, bool batched) {
  return json_list(tensors, [&](const exportkit_tensor_info* tensor) { return tensor_config(*tensor, batched); });
}

// Checks what config.pbtxt says of the inputs or outputs, of which it may have to list `all`. Failure.
void check_given(const std::string& kind, const std::vector<GivenTensor>& given, TensorInfos tensors, bool batched,
                 bool all) {
  const auto refuse = [&](const std::string& why) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt contradicts the package: ", why, ". Without `", kind,
                  "` it is completed from the package: ", tensors_config(tensors, batched));
  };
  for (const GivenTensor& each : given) {
    const auto found = std::ranges::find_if(tensors, [&](const auto* tensor) { return each.name == tensor->name; });
    if (found == tensors.end()) refuse("there is no " + kind + " `" + each.name + "`");
    const exportkit_tensor_info& tensor = **found;
    if (each.dtype != dtype_of(tensor).config) {
      refuse("`" + each.name + "` is " + each.dtype + ", the package has " + tensor.dtype);
    }
    if (!within(each.dims, tensor, batched)) {
      refuse("`" + each.name + "` has the dims " + shown(each.dims) + ", the package " +
             shown(dims_of(tensor, batched)));
    }
  }
  for (const auto* tensor : tensors) {
    const bool listed = std::ranges::any_of(given, [&](const GivenTensor& each) { return each.name == tensor->name; });
    if (all && !listed) refuse("it does not have the " + kind + " `" + tensor->name + "`");
  }
}

}  // namespace

ModelConfig read_config(std::string_view text) {
  ModelConfig config;
  JsonReader json(text, 32);
  read_known(json, {{"default_model_filename", [&] { config.file = json.string(); }},
                    {"max_batch_size", [&] { config.max_batch_size = whole(json); }},
                    {"input", [&] { read_tensors(json, config.inputs, config.inputs_json); }},
                    {"output", [&] { read_tensors(json, config.outputs, config.outputs_json); }},
                    {"parameters", [&] { read_parameters(json, config.parameters); }},
                    {"instance_group", [&] { json.array([&] { read_group(json, config.instances); }); }},
                    {"sequence_batching", [&] { read_sequences(json, config.sequences); }},
                    {"dynamic_batching", [&] { json.skip(), config.dynamic_batching = true; }}});
  return config;
}

bool given_whole(const ModelConfig& config, const exportkit_method_info& method) {
  if (config.max_batch_size > 0 || config.inputs.empty()) return false;
  for (size_t i = 0; i < method.input_count; ++i) {
    if (config.inputs[0].name != method.inputs[i]->name) continue;
    return static_cast<int32_t>(config.inputs[0].dims.size()) == method.inputs[i]->ndim;
  }
  return false;
}

void check_config(const ModelConfig& config, const Served& served) {
  check_sequences(config, served);
  const bool many = config.max_batch_size > served.rows;
  if (many || (config.dynamic_batching && served.rows == 0)) {
    const std::string given = many ? concat("max_batch_size: ", config.max_batch_size) : "dynamic_batching";
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt has ", given, ", and the package allows ",
                  served.rows > 0 ? concat("at most ", served.rows, " rows in a call.")
                                  : "no requests in one call: " + served.alone + ". Leave it out.");
  }
  const exportkit_method_info& method = *served.method;
  if (!config.inputs.empty()) {
    check_given("input", config.inputs, {method.inputs, method.input_count}, served.rows > 0, true);
  }
  if (!config.outputs.empty()) {
    check_given("output", config.outputs, {method.outputs, method.output_count}, served.rows > 0, false);
  }
}

std::string completed(const ModelConfig& config, const Served& served) {
  const exportkit_method_info& method = *served.method;
  const bool batched = served.rows > 0;
  const int64_t rows = config.max_batch_size > 0 ? config.max_batch_size : served.rows;
  JsonMembers members = {
      {"max_batch_size", std::to_string(rows)},
      {"input", config.inputs.empty() ? tensors_config({method.inputs, method.input_count}, batched)
                                      : std::string(config.inputs_json)},
      {"output", config.outputs.empty() ? tensors_config({method.outputs, method.output_count}, batched)
                                        : std::string(config.outputs_json)}};
  // Triton keeps a batcher that is given, and wants to see it again.
  if (method.stateful) {
    members.emplace_back("sequence_batching",
                         concat(R"({"max_sequence_idle_microseconds":)", config.sequences.idle_microseconds,
                                R"(,"oldest":{"max_candidate_sequences":)", config.sequences.candidates,
                                R"(},"state":[)", state_config(), "]}"));
  } else if (batched || config.dynamic_batching) {
    members.emplace_back("dynamic_batching", "{}");
  }
  return json_object(members);
}

TRITONSERVER_DataType triton_dtype(const exportkit_tensor_info& tensor) { return dtype_of(tensor).triton; }

}  // namespace exportkit::triton
