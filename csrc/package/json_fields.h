// Private helpers that read JSON objects with known members.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
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
  const int64_t version = json.integer();
  if (version != 1) json.fail("expected version 1");
  return version;
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

// The same, by key.
template <class Read>
constexpr auto map_of(Read read) {
  return [=](JsonReader& json) {
    std::map<std::string, decltype(read(json))> members;
    json.object([&](std::string_view key) { members.emplace(key, read(json)); });
    return members;
  };
}

// --- objects -------------------------------------------------------------------------------------------------------

// A member of an object. `place` is a variable (a reference), a member of the struct that `object` makes, or
// std::ignore.
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

// A member that is checked and not kept.
template <class Read>
constexpr Field<decltype((std::ignore)), Read> unkept(const char* key, Read read) {
  return {key, std::ignore, read};
}

// A member of the struct that has the key's name.
#define FIELD(Struct, member, read) field(#member, &Struct::member, read)

// A member that may be absent; its place then stays as it is.
template <class Member>
constexpr Member optional(Member member) {
  member.required = false;
  return member;
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

// The field with its place in a struct.
template <class C, class T, class Read>
Field<T&, Read> placed(const Field<T C::*, Read>& field, C& out) {
  return {field.key, out.*field.place, field.read, field.required};
}
template <class C, class Read>
Field<decltype((std::ignore)), Read> placed(const Field<decltype((std::ignore)), Read>& field, C&) {
  return field;
}

// A struct that is an object with exactly these keys. Its first member is kept.
template <class C, class T, class Read, class... Rest>
constexpr auto object(Field<T C::*, Read> first, Rest... rest) {
  return [=](JsonReader& json) {
    C out{};
    fields(json, placed(first, out), placed(rest, out)...);
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
