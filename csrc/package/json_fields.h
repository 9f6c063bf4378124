// Private helpers of manifest.cpp: what an object's members are read with.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "package/json.h"
#include "package/text.h"

namespace exportkit {

template <class... Words>
auto one_of(Words... words) {
  return [=](JsonReader& json) {
    std::string value = json.string();
    if (((value != words) && ...)) json.fail("unknown word " + shown(value));
    return value;
  };
}

template <class Read>
auto nullable(Read read) {
  return [=](JsonReader& json) -> std::optional<decltype(read(json))> {
    if (json.peek() != JsonReader::Kind::kNull) return read(json);
    json.null();
    return std::nullopt;
  };
}

template <class Read>
auto list(Read read) {
  return [=](JsonReader& json) {
    std::vector<decltype(read(json))> items;
    json.array([&] { items.push_back(read(json)); });
    return items;
  };
}

// An object with any keys and values of one kind, in the file's order.
template <class Read>
auto object_of(Read read) {
  return [=](JsonReader& json) {
    std::vector<std::pair<std::string, decltype(read(json))>> members;
    json.object([&](std::string_view key) {
      std::string kept(key);
      members.emplace_back(std::move(kept), read(json));
    });
    return members;
  };
}

template <class T, class Read>
struct Field {
  const char* key;
  T& value;
  Read read;
  bool required = true;
};

template <class T, class Read>
Field<T, Read> field(const char* key, T& value, Read read) {
  return {key, value, read};
}

// A key that may be absent; the value then stays as it is.
template <class T, class Read>
Field<T, Read> optional_field(const char* key, T& value, Read read) {
  return {key, value, read, false};
}

// Reads an object with exactly these keys. The caller has checked that no key appears twice. Returns a bit mask of the
// keys that were present; the first field is the lowest bit.
template <class... Fields>
uint32_t fields(JsonReader& json, const Fields&... each) {
  uint32_t found = 0;
  json.object([&](std::string_view key) {
    uint32_t bit = 1;
    const auto take = [&](const auto& field) {
      const bool here = key == field.key;
      if (here) {
        field.value = field.read(json);
        found |= bit;
      }
      bit <<= 1;
      return here;
    };
    if (!(take(each) || ...)) json.fail("unknown key");
  });
  uint32_t bit = 1;
  const auto check = [&](const auto& field) {
    if (field.required && !(found & bit)) json.fail("object lacks the key " + shown(field.key));
    bit <<= 1;
  };
  (check(each), ...);
  return found;
}

}  // namespace exportkit
