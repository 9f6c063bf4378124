// Properties and encodings of strings.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace exportkit {

// Of ASCII, whatever the locale.
inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline bool is_alnum(char c) { return is_digit(c) || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

// Reads the code point at `at` and moves `at` past it; kNoCodePoint for invalid UTF-8.
inline constexpr char32_t kNoCodePoint = 0xFFFFFFFF;
char32_t next_code_point(std::string_view text, size_t& at);

// Whether the text is valid UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

// Appends a code point as UTF-8. A surrogate becomes three bytes, which is_utf8 refuses.
void append_utf8(std::string& text, char32_t code_point);

// Whether a text is an ASCII letter or _, then letters, digits and _.
bool is_word(std::string_view text);
// Whether a parameter, a named tuple or its field may have this name: a word, but none of Python's keywords.
bool is_name(std::string_view text);

// Whether a text is this number of hexadecimal digits in lower case.
bool is_hex(std::string_view text, size_t digits = 64);

// Decodes base64 with padding and without line breaks. Nothing if the text is not the canonical encoding.
std::optional<std::string> decode_base64(std::string_view text);

// The text for messages: printable, in quotes, at most about 100 bytes of it.
std::string shown(std::string_view text);

// A text that `concat` writes as `shown` does.
struct Quoted {
  std::string_view text;
};

// The parts one after the other; numbers in decimal.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  const auto add = [&text](const auto& part) {
    if constexpr (std::is_same_v<decltype(part), const Quoted&>) {
      text += shown(part.text);
    } else if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(part)>> && sizeof(part) > 1) {
      text += std::to_string(part);
    } else {
      static_assert(!std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>);
      text += part;
    }
  };
  (add(parts), ...);
  return text;
}

// The parts with `by` between them.
std::string joined(const std::vector<std::string>& parts, std::string_view by = ", ");

// The first texts, with commas between them, and how many more there are. `each` turns an item into a text.
template <class List, class F>
std::string some(const List& items, size_t most, const F& each) {
  std::vector<std::string> first;
  for (size_t i = 0; i < items.size() && i < most; ++i) first.push_back(each(items[i]));
  return joined(first) + (items.size() > most ? " and " + std::to_string(items.size() - most) + " more" : "");
}

// The text before the first line feed.
std::string first_line(std::string_view text);

// The text without terminal control codes: bytes other than printable ASCII become \xNN.
std::string printable(std::string_view text);

// --- JSON ------------------------------------------------------------------------------------------------------------

// A string in quotes, as Rust's serde_json writes it, so that safetensors files have the bytes that Python gives them.
// Bytes of invalid UTF-8, which a file's name may have, become question marks.
std::string json_text(std::string_view text);

// A finite number, in the fewest digits that read as the same number.
std::string json_number(double value);

inline std::string json_bool(bool value) { return value ? "true" : "false"; }

// A list; `each` turns an item into JSON.
template <class List, class F>
std::string json_list(const List& items, const F& each) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + each(item);
  return out + "]";
}

// An object. The members' values are JSON.
using JsonMembers = std::vector<std::pair<std::string, std::string>>;
std::string json_object(const JsonMembers& members);

// The same JSON in printable ASCII: other characters, which only strings have, are escaped.
std::string json_ascii(std::string_view json);

}  // namespace exportkit
