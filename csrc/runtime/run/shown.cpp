#include "runtime/run/shown.h"

#include <cmath>

#include "package/json_text.h"

namespace exportkit::run {

std::string number(const std::optional<double>& value) {
  if (!value) return "null";
  return std::isfinite(*value) ? json_number(*value) : json_text(std::to_string(*value));
}

std::string text_or_null(const std::string& text) { return text.empty() ? "null" : json_text(text); }

std::string shape_text(const std::vector<int64_t>& shape) {
  return json_list(shape, [](int64_t size) { return std::to_string(size); });
}

std::string shown(const std::map<std::string, int64_t>& sizes) {
  std::string text;
  for (const auto& [dimension, size] : sizes)
    text += (text.empty() ? "" : ", ") + dimension + "=" + std::to_string(size);
  return text;
}

namespace {

std::string shown(const TensorInfo& tensor) {
  std::string text = tensor.name + ": " + tensor.dtype + "[";
  for (const SizeRange& size : tensor.shape) text += (&size == &tensor.shape.front() ? "" : ", ") + size.text;
  return text + (tensor.written ? "], written" : "]");
}

}  // namespace

std::string shown(const std::vector<TensorInfo>& tensors) {
  std::string text;
  for (const TensorInfo& tensor : tensors) text += (text.empty() ? "" : ", ") + shown(tensor);
  return text;
}

namespace {

std::string to_json(const OutputError& error) {
  return json_object({{"rms", number(error.rms)},
                      {"rms_allowed", number(error.rms_allowed)},
                      {"greatest", number(error.greatest)},
                      {"greatest_allowed", number(error.greatest_allowed)}});
}

}  // namespace

std::string to_json(const OutputReport& output) {
  return json_object({{"name", json_text(output.name)},
                      {"compared", std::to_string(output.compared)},
                      {"mismatched", std::to_string(output.mismatched)},
                      {"max_abs", number(output.max_abs)},
                      {"max_rel", number(output.max_rel)},
                      {"rtol", number(output.rtol)},
                      {"atol", number(output.atol)},
                      {"error", output.error ? to_json(*output.error) : "null"},
                      {"note", text_or_null(output.note)}});
}

std::string to_json(const CallReport& call) {
  JsonMembers sizes;
  for (const auto& [dimension, size] : call.sizes) sizes.emplace_back(dimension, std::to_string(size));
  return json_object(
      {{"method", json_text(call.method)},
       {"ok", json_bool(call.ok())},
       {"sizes", json_object(sizes)},
       {"problem", text_or_null(call.problem)},
       {"outputs", json_list(call.outputs, [](const OutputReport& output) { return to_json(output); })}});
}

}  // namespace exportkit::run
