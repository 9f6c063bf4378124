#include "package/json_text.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "package/text.h"

namespace exportkit {
namespace {

std::string escaped(uint32_t unit) {
  char text[8];
  std::snprintf(text, sizeof text, "\\u%04x", unit);
  return text;
}

}  // namespace

std::string json_text(std::string_view text) {
  constexpr std::string_view kMeanings = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
  const bool utf8 = is_utf8(text);
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (const size_t index = kMeanings.find(c); index != std::string_view::npos) {
      (out += '\\') += kLetters[index];
    } else if (byte < 0x20) {
      out += escaped(byte);
    } else {
      out += byte >= 0x80 && !utf8 ? '?' : c;
    }
  }
  return out + '"';
}

std::string json_number(double value) {
  char text[32];
  for (int digits = 15; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (std::strtod(text, nullptr) == value) break;
  }
  return text;
}

std::string json_object(const JsonMembers& members) {
  std::string out = "{";
  for (const auto& [key, value] : members) out += (out.size() > 1 ? "," : "") + json_text(key) + ":" + value;
  return out + "}";
}

std::string json_ascii(std::string_view json) {
  std::string out;
  for (size_t at = 0; at < json.size();) {
    if (const char c = json[at]; static_cast<uint8_t>(c) < 0x7F) {
      out += c;
      ++at;
      continue;
    }
    const uint32_t code_point = next_code_point(json, at);
    if (code_point < 0x10000) {
      out += escaped(code_point);
    } else {  // two halves, as JSON has it
      out += escaped(0xD800 + ((code_point - 0x10000) >> 10)) + escaped(0xDC00 + ((code_point - 0x10000) & 0x3FF));
    }
  }
  return out;
}

}  // namespace exportkit
