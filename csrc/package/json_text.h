// Writes JSON.
#pragma once

#include <string>
#include <string_view>

namespace exportkit {

// A string in quotes. Bytes of invalid UTF-8, which a file's name may have, become question marks.
std::string json_text(std::string_view text);

// A list; `each` turns an item into JSON.
template <class List, class F>
std::string json_list(const List& items, const F& each) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + each(item);
  return out + "]";
}

}  // namespace exportkit
