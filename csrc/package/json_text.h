// JSON that is written.
#pragma once

#include <string>
#include <string_view>

namespace exportkit {

// A string in quotes. What is no UTF-8, as in a file's name, has a question mark in its place.
std::string json_text(std::string_view text);

// A list of what `each` makes of its items.
template <class List, class F>
std::string json_list(const List& items, const F& each) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + each(item);
  return out + "]";
}

}  // namespace exportkit
