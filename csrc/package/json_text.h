// Writes JSON.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace exportkit {

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
