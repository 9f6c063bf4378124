// Private helpers that read JSON objects with known members.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "package/json.h"
#include "package/text.h"

namespace exportkit {

// --- values --------------------------------------------------------------------------------------------------------

inline std::string text(JsonReader& json) { return json.string(); }
inline std::string sha256(JsonReader& json) { return json.sha256(); }
inline bool boolean(JsonReader& json) { return json.boolean(); }
inline int64_t integer(JsonReader& json) { return json.integer(); }

// The integer `format_version` of an object, as it is written; empty if it has none.
inline std::string_view format_version(JsonReader json) {
  using enum JsonReader::Kind;
  const bool found = json.peek() == kObject && json.seek("format_version") && json.peek() == kNumber;
  return found && json.at_integer() ? json.number_text() : std::string_view();
}

// The version of a file, of which there is one.
inline int64_t version_1(JsonReader& json) {
  if (json.integer() != 1) json.fail("expected version 1");
  return 1;
}

template <class... Words>
constexpr auto one_of(Words... words) {
  return [=](JsonReader& json) {
    std::string value = json.string();
    if (((value != words) && ...)) json.fail("unknown word " + shown(value));
    return value;
  };
}

template <class Read>
constexpr auto nullable(Read read) {
  return [=](JsonReader& json) -> std::optional<decltype(read(json))> {
    if (json.peek() != JsonReader::Kind::kNull) return read(json);
    json.null();
    return std::nullopt;
  };
}

template <class Read>
constexpr auto list(Read read) {
  return [=](JsonReader& json) {
    std::vector<decltype(read(json))> items;
    json.array([&] { items.push_back(read(json)); });
    return items;
  };
}

// An object with any keys and values of one kind, in the file's order.
template <class Read>
constexpr auto object_of(Read read) {
  return [=](JsonReader& json) {
    std::vector<std::pair<std::string, decltype(read(json))>> members;
    json.object([&](std::string_view key) {
      std::string kept(key);
      members.emplace_back(std::move(kept), read(json));
    });
    return members;
  };
}

// --- objects -------------------------------------------------------------------------------------------------------

// A member of an object. `place` is a variable (a reference), or a member of the struct that `object` makes.
template <class Place, class Read>
struct Field {
  const char* key;
  Place place;
  Read read;
  bool required = true;
};

template <class T, class Read>
Field<T&, Read> field(const char* key, T& value, Read read) {
  return {key, value, read};
}

template <class C, class T, class Read>
constexpr Field<T C::*, Read> field(const char* key, T C::* member, Read read) {
  return {key, member, read};
}

// A member of the struct that has the key's name.
#define FIELD(Struct, member, read) field(#member, &Struct::member, read)

// A key that may be absent; the value then stays as it is.
template <class... Given>
constexpr auto optional_field(const char* key, Given&&... given) {
  auto made = field(key, std::forward<Given>(given)...);
  made.required = false;
  return made;
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
        field.place = field.read(json);
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

// A struct that is an object with exactly these keys.
template <class C, class... T, class... Read>
constexpr auto object(Field<T C::*, Read>... each) {
  return [=](JsonReader& json) {
    C out{};
    fields(json, Field<T&, Read>{each.key, out.*each.place, each.read, each.required}...);
    return out;
  };
}

using Members = std::map<std::string_view, std::function<void()>>;

// Reads these members of an object, and skips others. Returns those that it does not have.
inline Members read_known(JsonReader& json, Members members) {
  json.object([&](std::string_view key) {
    const auto member = members.extract(key);
    member.empty() ? json.skip() : member.mapped()();
  });
  return members;
}

// Reads an object that must have these members. Others are skipped.
inline void read_members(JsonReader& json, Members members) {
  const Members missing = read_known(json, std::move(members));
  if (!missing.empty()) json.fail("object lacks the key " + shown(missing.begin()->first));
}

}  // namespace exportkit
