#include "package/text.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace exportkit {

namespace {

constexpr std::string_view kBase64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::string_view kKeywords[] = {"False",  "None",   "True",    "and",      "as",       "assert", "async",
                                          "await",  "break",  "class",   "continue", "def",      "del",    "elif",
                                          "else",   "except", "finally", "for",      "from",     "global", "if",
                                          "import", "in",     "is",      "lambda",   "nonlocal", "not",    "or",
                                          "pass",   "raise",  "return",  "try",      "while",    "with",   "yield"};

// A byte or a code unit in the way that a format of printf gives.
std::string escaped(const char* format, uint32_t unit) {
  char text[8];
  std::snprintf(text, sizeof text, format, unit);
  return text;
}

}  // namespace

char32_t next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&](size_t index) { return static_cast<uint8_t>(text[index]); };
  const uint8_t lead = byte(at++);
  if (lead < 0x80) return lead;
  if (lead < 0xC2 || lead > 0xF4) return kNoCodePoint;
  const int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
  char32_t code_point = lead & (0x3F >> more);
  for (int i = 0; i < more; ++i) {
    if (at >= text.size() || (byte(at) & 0xC0) != 0x80) return kNoCodePoint;
    code_point = code_point << 6 | (byte(at++) & 0x3F);
  }
  constexpr char32_t kLeast[] = {0x80, 0x800, 0x10000};
  const bool surrogate = code_point >= 0xD800 && code_point < 0xE000;
  return code_point < kLeast[more - 1] || code_point > 0x10FFFF || surrogate ? kNoCodePoint : code_point;
}

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    constexpr uint64_t kBeyondAscii = 0x8080808080808080;
    uint64_t eight;
    if (at + sizeof eight <= text.size()) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if (!(eight & kBeyondAscii)) {
        at += sizeof eight;
        continue;
      }
    }
    if (next_code_point(text, at) == kNoCodePoint) return false;
  }
  return true;
}

void append_utf8(std::string& text, char32_t c) {
  if (c < 0x80) {
    text += static_cast<char>(c);
    return;
  }
  const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  text += static_cast<char>((0xFF << (7 - more) & 0xFF) | c >> (6 * more));
  for (int i = more - 1; i >= 0; --i) text += static_cast<char>(0x80 | (c >> (6 * i) & 0x3F));
}

bool is_word(std::string_view text) {
  const auto is_allowed = [](char c) { return is_alnum(c) || c == '_'; };
  return !text.empty() && !is_digit(text[0]) && std::all_of(text.begin(), text.end(), is_allowed);
}

bool is_name(std::string_view text) { return is_word(text) && std::ranges::count(kKeywords, text) == 0; }

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::optional<std::string> decode_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  const size_t end = std::min(text.find('='), text.size());
  if (text.size() - end > 2 || text.find_first_not_of('=', end) != std::string_view::npos) return std::nullopt;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;
  for (const char letter : text.substr(0, end)) {
    const size_t value = kBase64.find(letter);
    if (value == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) {
      bytes += static_cast<char>(bits >> (count -= 8) & 0xff);
      bits &= (1U << count) - 1;
    }
  }
  if (bits != 0) return std::nullopt;  // the last letter has unused bits that are set
  return bytes;
}

std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c >= 0x20 && c < 0x7F && c != '\\' && c != '\'') {
      out += c;
    } else {
      out += escaped("\\x%02x", static_cast<uint8_t>(c));
    }
  }
  return out;
}

std::string shown(std::string_view text) {
  constexpr size_t kShown = 100;
  return "'" + printable(text.substr(0, kShown)) + (text.size() > kShown ? "...'" : "'");
}

std::string joined(const std::vector<std::string>& parts, std::string_view by) {
  std::string text;
  for (const std::string& part : parts) (text += text.empty() ? "" : by) += part;
  return text;
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

// --- JSON ------------------------------------------------------------------------------------------------------------

std::string json_text(std::string_view text) {
  constexpr std::string_view kMeanings = "\"\\\b\f\n\r\t", kLetters = "\"\\bfnrt";
  const bool utf8 = is_utf8(text);
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (const size_t index = kMeanings.find(c); index != std::string_view::npos) {
      (out += '\\') += kLetters[index];
    } else if (byte < 0x20) {
      out += escaped("\\u%04x", byte);
    } else {
      out += byte >= 0x80 && !utf8 ? '?' : c;
    }
  }
  return out + '"';
}

std::string json_number(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
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
    const uint32_t code_point = next_code_point(json, at), beyond = code_point - 0x10000;
    if (code_point < 0x10000) {
      out += escaped("\\u%04x", code_point);
    } else {  // two halves, as JSON has it
      out += escaped("\\u%04x", 0xD800 + (beyond >> 10)) + escaped("\\u%04x", 0xDC00 + (beyond & 0x3FF));
    }
  }
  return out;
}

}  // namespace exportkit
