#include "triton/config.h"

#include <algorithm>
#include <charconv>

#include "package/json.h"
#include "package/json_text.h"
#include "triton/errors.h"
#include "triton/tensors.h"

namespace exportkit::triton {
namespace {

// --- reading ---------------------------------------------------------------------------------------------------------

// Triton writes some integers of 64 bits as text, as protobuf does.
int64_t integer(JsonReader& json) {
  if (json.peek() != JsonReader::Kind::kString) return json.integer();
  const std::string text = json.string();
  int64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc{})
    json.fail("expected an integer");
  return value;
}

std::vector<int64_t> integers(JsonReader& json) {
  std::vector<int64_t> found;
  json.array([&] { found.push_back(integer(json)); });
  return found;
}

// The sizes that the backend gets are those of `reshape`, where there is one.
GivenTensor read_tensor(JsonReader& json) {
  GivenTensor tensor;
  bool reshaped = false;
  json.object([&](std::string_view key) {
    if (key == "name") {
      tensor.name = json.string();
    } else if (key == "data_type") {
      tensor.dtype = json.string();
    } else if (key == "dims" && !reshaped) {
      tensor.dims = integers(json);
    } else if (key == "reshape") {
      reshaped = true;
      tensor.dims.clear();
      json.object([&](std::string_view part) { part == "shape" ? void(tensor.dims = integers(json)) : json.skip(); });
    } else {
      json.skip();
    }
  });
  return tensor;
}

void read_tensors(JsonReader& json, std::vector<GivenTensor>& tensors, std::string_view& text) {
  JsonReader again = json;
  text = again.skipped();
  json.array([&] { tensors.push_back(read_tensor(json)); });
}

void read_parameters(JsonReader& json, std::map<std::string, std::string>& parameters) {
  json.object([&](std::string_view name) {
    std::string& value = parameters[std::string(name)];
    json.object([&](std::string_view key) { key == "string_value" ? void(value = json.string()) : json.skip(); });
  });
}

InstanceGroup read_group(JsonReader& json) {
  InstanceGroup group;
  json.object([&](std::string_view key) {
    if (key == "kind") {
      group.kind = json.string();
    } else if (key == "count") {
      group.count = integer(json);
    } else if (key == "gpus") {
      group.gpus = integers(json);
    } else {
      json.skip();
    }
  });
  return group;
}

// Whether a state of config.pbtxt is the one that the backend needs.
bool is_session(JsonReader& json) {
  std::string input, output, dtype;
  std::vector<int64_t> dims;
  json.object([&](std::string_view key) {
    if (key == "input_name") {
      input = json.string();
    } else if (key == "output_name") {
      output = json.string();
    } else if (key == "data_type") {
      dtype = json.string();
    } else if (key == "dims") {
      dims = integers(json);
    } else {
      json.skip();
    }
  });
  return input == kState && output == kState && dtype == "TYPE_UINT8" && dims == std::vector<int64_t>{kStateBytes};
}

void read_sequences(JsonReader& json, SequenceBatching& found) {
  found.given = true;
  json.object([&](std::string_view key) {
    if (key == "max_sequence_idle_microseconds") {
      found.idle_microseconds = integer(json);
    } else if (key == "oldest") {
      found.oldest = true;
      json.object([&](std::string_view part) {
        part == "max_candidate_sequences" ? void(found.candidates = integer(json)) : json.skip();
      });
    } else if (key == "state") {
      json.array([&] { found.state = is_session(json) || found.state; });
    } else {
      json.skip();
    }
  });
  constexpr int64_t kSecond = 1'000'000, kYear = 366 * 86'400 * kSecond;
  if (found.idle_microseconds <= 0) found.idle_microseconds = kSecond;  // as Triton takes 0
  found.idle_microseconds = std::min(found.idle_microseconds, kYear);
  if (found.candidates <= 0) found.candidates = SequenceBatching().candidates;
}

// --- checking --------------------------------------------------------------------------------------------------------

std::string state_config() {
  return R"({"input_name":")" + std::string(kState) + R"(","output_name":")" + kState +
         R"(","data_type":"TYPE_UINT8","dims":[)" + std::to_string(kStateBytes) + "]}";
}

void check_sequences(const ModelConfig& config, const Served& served) {
  const bool stateful = served.method->stateful != 0;
  const std::string name = std::string("the method `") + served.method->name + "`";
  if (!stateful && config.sequences.given) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "config.pbtxt has sequence_batching, and " + name + " has no state. Leave it out.");
  }
  if (stateful && config.dynamic_batching) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG, "config.pbtxt has dynamic_batching, and " + name +
                                                      " has state, which needs sequence_batching. Leave it out.");
  }
  if (config.sequences.given && !(config.sequences.oldest && config.sequences.state)) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "sequence_batching of config.pbtxt must have oldest { } and state [ { input_name: \"" +
                      std::string(kState) + "\" output_name: \"" + kState + "\" data_type: TYPE_UINT8 dims: [ " +
                      std::to_string(kStateBytes) +
                      " ] } ], in which the backend keeps a sequence's session. Add "
                      "them, or leave sequence_batching out.");
  }
}

}  // namespace

ModelConfig read_config(std::string_view text) {
  ModelConfig config;
  JsonReader json(text, 32);
  json.object([&](std::string_view key) {
    if (key == "default_model_filename") {
      config.file = json.string();
    } else if (key == "max_batch_size") {
      config.max_batch_size = integer(json);
    } else if (key == "input") {
      read_tensors(json, config.inputs, config.inputs_json);
    } else if (key == "output") {
      read_tensors(json, config.outputs, config.outputs_json);
    } else if (key == "parameters") {
      read_parameters(json, config.parameters);
    } else if (key == "instance_group") {
      json.array([&] { config.groups.push_back(read_group(json)); });
    } else if (key == "sequence_batching") {
      read_sequences(json, config.sequences);
    } else {
      config.dynamic_batching = config.dynamic_batching || key == "dynamic_batching";
      json.skip();
    }
  });
  return config;
}

std::map<std::string, int64_t> devices_of(const ModelConfig& config) {
  std::map<std::string, int64_t> devices;
  for (const InstanceGroup& group : config.groups) {
    if (group.kind == "KIND_GPU") {
      for (const int64_t gpu : group.gpus) devices["cuda:" + std::to_string(gpu)] += group.count;
    } else {
      devices[group.kind == "KIND_CPU" ? "cpu" : "auto"] += group.count;
    }
  }
  return devices;
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
    const std::string given = many ? "max_batch_size: " + std::to_string(config.max_batch_size) : "dynamic_batching";
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "config.pbtxt has " + given + ", and the package allows " +
                      (served.rows > 0 ? "at most " + std::to_string(served.rows) + " rows in a call."
                                       : "no requests in one call: " + served.alone + ". Leave it out."));
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
                         R"({"max_sequence_idle_microseconds":)" + std::to_string(config.sequences.idle_microseconds) +
                             R"(,"oldest":{"max_candidate_sequences":)" + std::to_string(config.sequences.candidates) +
                             R"(},"state":[)" + state_config() + "]}");
  } else if (batched || config.dynamic_batching) {
    members.emplace_back("dynamic_batching", "{}");
  }
  return json_object(members);
}

}  // namespace exportkit::triton
