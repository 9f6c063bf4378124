#include "package/json_text.h"

#include <cstdint>

#include "package/text.h"

namespace exportkit {

std::string json_text(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  const bool utf8 = is_utf8(text);
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (byte < 0x20) {
      ((out += "\\u00") += kHex[byte >> 4]) += kHex[byte & 15];
    } else {
      out += byte >= 0x80 && !utf8 ? '?' : c;
    }
  }
  return out + '"';
}

}  // namespace exportkit
