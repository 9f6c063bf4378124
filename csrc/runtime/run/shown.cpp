#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "package/text.h"
#include "runtime/run/parts.h"

namespace exportkit::run {
namespace {

struct Range {
  uint32_t first, last;
};

// Control characters; invisible, joining and direction marks; spaces other than U+0020; surrogates; private and
// unassigned code points.
constexpr Range kNotPrintable[] = {
    {0, 0x1F},          {0x7F, 0xA0},       {0xAD, 0xAD},       {0x600, 0x605},     {0x61C, 0x61C},
    {0x6DD, 0x6DD},     {0x70F, 0x70F},     {0x890, 0x891},     {0x8E2, 0x8E2},     {0x1680, 0x1680},
    {0x180E, 0x180E},   {0x2000, 0x200F},   {0x2028, 0x202F},   {0x205F, 0x206F},   {0x3000, 0x3000},
    {0xD800, 0xF8FF},   {0xFEFF, 0xFEFF},   {0xFFF0, 0xFFFB},   {0xFFFE, 0xFFFF},   {0x110BD, 0x110BD},
    {0x110CD, 0x110CD}, {0x13430, 0x1343F}, {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A}, {0xE0000, 0xFFFFFFFF}};

bool is_printable(uint32_t code_point) {
  return std::none_of(std::begin(kNotPrintable), std::end(kNotPrintable),
                      [&](const Range& range) { return range.first <= code_point && code_point <= range.last; });
}

std::string shown(const TensorInfo& tensor) {
  std::string text = tensor.name + ": " + tensor.dtype + "[";
  for (const SizeRange& size : tensor.shape) text += (&size == &tensor.shape.front() ? "" : ", ") + size.text;
  return text + (tensor.written ? "], written" : "]");
}

std::string to_json(const OutputError& error) {
  return json_object({{"rms", number(error.rms)},
                      {"rms_allowed", number(error.rms_allowed)},
                      {"greatest", number(error.greatest)},
                      {"greatest_allowed", number(error.greatest_allowed)}});
}

}  // namespace

std::string number(const std::optional<double>& value) {
  if (!value) return "null";
  return std::isfinite(*value) ? json_number(*value) : json_text(std::to_string(*value));
}

std::string text_or_null(const std::string& text) { return text.empty() ? "null" : json_text(text); }

std::string shown(const std::map<std::string, int64_t>& sizes) {
  std::string text;
  for (const auto& [dimension, size] : sizes)
    text += (text.empty() ? "" : ", ") + dimension + "=" + std::to_string(size);
  return text;
}

std::string shown(const std::vector<TensorInfo>& tensors) {
  std::string text;
  for (const TensorInfo& tensor : tensors) text += (text.empty() ? "" : ", ") + shown(tensor);
  return text;
}

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

std::string printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    size_t size = 0;
    const char32_t code_point = next_code_point(text, size);
    const bool valid = code_point != kNoCodePoint;
    if (!valid) size = 1;
    if (valid && is_printable(code_point)) {
      out += text.substr(0, size);
    } else {
      const uint32_t shown = valid ? code_point : static_cast<uint8_t>(text[0]);
      char escape[16];
      std::snprintf(escape, sizeof escape, shown < 0x100 ? "\\x%02x" : shown < 0x10000 ? "\\u%04x" : "\\U%08x", shown);
      out += escape;
    }
    text.remove_prefix(size);
  }
  return out;
}

}  // namespace exportkit::run
