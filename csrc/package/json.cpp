#include "package/json.h"

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include "package/text.h"

namespace exportkit {

namespace {

bool is_integer(std::string_view number) { return number.find_first_of(".eE") == std::string_view::npos; }

// Rounds correctly; infinite if the number is too large, which std::from_chars does not tell from one too close to 0.
double to_double(std::string_view number) {
  static const locale_t kC = newlocale(LC_ALL_MASK, "C", nullptr);  // whose decimal point is JSON's
  return strtod_l(std::string(number).c_str(), nullptr, kC);
}

}  // namespace

JsonReader::JsonReader(std::string_view text, int max_depth) : text_(text), max_depth_(max_depth) {
  if (!is_utf8(text)) throw JsonError("it is not UTF-8");
}

JsonReader JsonReader::checked(std::string_view text, int max_depth) {
  JsonReader json(text, max_depth), whole = json;
  whole.skip();
  whole.end();
  if (!whole.oddity().empty()) throw JsonError("it contains " + whole.oddity());
  return json;
}

void JsonReader::count_value() {
  if (++values_ > kMaxJsonValues) fail("more than " + std::to_string(kMaxJsonValues) + " values");
}

JsonReader::Kind JsonReader::peek() {
  whitespace();
  using enum Kind;
  constexpr std::string_view kFirst = "{[\"tfn-0123456789";
  constexpr Kind kKinds[] = {kObject, kArray, kString, kBool, kBool, kNull, kNumber};
  const size_t index = at_ < text_.size() ? kFirst.find(text_[at_]) : std::string_view::npos;
  if (index == std::string_view::npos) expected("a value");
  return kKinds[std::min(index, std::size(kKinds) - 1)];
}

std::string JsonReader::string() {
  if (peek() != Kind::kString) expected("a string");
  ++at_;
  std::string out;
  for (;;) {
    const size_t start = at_;
    while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\') {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) fail("control character in a string");
      ++at_;
    }
    out.append(text_, start, at_ - start);
    if (at_ == text_.size()) fail("unterminated string");
    if (text_[at_++] == '"') return out;
    escape(out);
  }
}

std::string JsonReader::sha256() {
  std::string text = string();
  if (!is_hex(text)) fail("expected 64 lower-case hexadecimal digits, found " + shown(text));
  return text;
}

// Reads the part of an escape after the backslash.
void JsonReader::escape(std::string& out) {
  constexpr std::string_view kLetters = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
  const char letter = at_ < text_.size() ? text_[at_++] : '\0';
  if (const size_t index = kLetters.find(letter); index != std::string_view::npos) {
    out += kMeanings[index];
    return;
  }
  if (letter != 'u') fail("unknown escape in a string");
  char32_t code_point = hex4();
  if (code_point >= 0xD800 && code_point < 0xDC00 && text_.substr(at_, 2) == "\\u") {
    const size_t before = at_;
    at_ += 2;
    const char32_t low = hex4();
    if (low >= 0xDC00 && low < 0xE000) {
      code_point = 0x10000 + ((code_point - 0xD800) << 10) + (low - 0xDC00);
    } else {
      at_ = before;
    }
  }
  if (code_point >= 0xD800 && code_point < 0xE000) half_pair_ = true;
  append_utf8(out, code_point);
}

char32_t JsonReader::hex4() {
  const std::string_view digits = text_.substr(at_, 4);
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc{} || digits.size() < 4 || end != digits.data() + 4) fail("escape without four digits");
  at_ += 4;
  return value;
}

std::string_view JsonReader::number_text() {
  if (peek() != Kind::kNumber) expected("a number");
  const size_t start = at_;
  const auto digits = [&] {
    const size_t first = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    if (at_ == first) fail("number without digits");
  };
  const auto take = [&](std::string_view any_of) {
    const bool there = at_ < text_.size() && any_of.find(text_[at_]) != std::string_view::npos;
    at_ += there;
    return there;
  };
  take("-");
  if (!take("0")) digits();
  if (take(".")) digits();
  if (take("eE")) {
    take("+-");
    digits();
  }
  return text_.substr(start, at_ - start);
}

bool JsonReader::at_integer() {
  const size_t before = at_;
  const bool integer = is_integer(number_text());
  at_ = before;
  return integer;
}

int64_t JsonReader::integer() {
  if (peek() != Kind::kNumber || !at_integer()) expected("an integer");
  const std::string_view text = number_text();
  int64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc{}) {
    fail("integer does not fit in 64 bits");
  }
  return value;
}

double JsonReader::number() {
  const double value = to_double(number_text());
  if (!std::isfinite(value)) fail("number out of range");
  return value;
}

bool JsonReader::boolean() {
  if (peek() != Kind::kBool) expected("true or false");
  const bool value = text_[at_] == 't';
  expect(value ? "true" : "false");
  return value;
}

void JsonReader::null() {
  if (peek() != Kind::kNull) expected("null");
  expect("null");
}

void JsonReader::skip() {
  count_value();
  switch (peek()) {
    case Kind::kObject: {
      std::vector<std::string> keys;
      object([&](std::string_view key) {
        keys.emplace_back(key);
        skip();
      });
      std::ranges::sort(keys);
      if (const auto twice = std::ranges::adjacent_find(keys); twice != keys.end()) {
        fail("duplicate key " + shown(*twice));
      }
      return;
    }
    case Kind::kArray:
      return array([&] { skip(); });
    case Kind::kString:
      string();
      return;
    case Kind::kNumber: {
      const std::string_view text = number_text();
      if (!is_integer(text) && !std::isfinite(to_double(text))) infinite_ = true;
      return;
    }
    case Kind::kBool:
      boolean();
      return;
    case Kind::kNull:
      null();
      return;
  }
}

std::string_view JsonReader::skipped() {
  whitespace();
  const size_t begin = at_;
  skip();
  return text_.substr(begin, at_ - begin);
}

void JsonReader::end() {
  whitespace();
  if (at_ < text_.size()) fail("text after the end of the value");
}

bool JsonReader::seek(std::string_view wanted) {
  enter('{', "object");
  for (bool first = true; more(first, '}'); first = false) {
    if (key() == wanted) return true;
    skip();
  }
  return false;
}

void JsonReader::whitespace() {
  const auto blank = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
  while (at_ < text_.size() && blank(text_[at_])) ++at_;
}

void JsonReader::expect(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) expected(word);
  at_ += word.size();
}

void JsonReader::enter(char bracket, std::string_view what) {
  whitespace();
  if (at_ == text_.size() || text_[at_] != bracket) expected(what);
  ++at_;
  if (++depth_ > max_depth_) fail("brackets nested deeper than " + std::to_string(max_depth_));
}

// Whether another member or item follows. Reads a comma only where one must be.
bool JsonReader::more(bool first, char bracket) {
  whitespace();
  const char c = at_ < text_.size() ? text_[at_] : '\0';
  if (c == bracket) {
    ++at_;
    return false;
  }
  if (first) return true;
  if (c != ',') expected("a comma or the closing bracket");
  ++at_;
  return true;
}

std::string JsonReader::key() {
  std::string key = string();
  whitespace();
  expect(":");
  return key;
}

void JsonReader::expected(std::string_view what) {
  fail(concat("expected ", what, ", found ", at_ < text_.size() ? shown(text_.substr(at_, 20)) : "the end"));
}

std::string JsonReader::oddity() const {
  if (half_pair_) return "a string with half of a surrogate pair";
  return infinite_ ? "a number out of range" : "";
}

void JsonReader::fail(const std::string& what) const {
  std::string place = "$";
  for (const Step& step : path_) {
    place += step.key.data() ? "." + printable(step.key.substr(0, 100)) : "[" + std::to_string(step.index) + "]";
  }
  throw JsonError(what + " (at `" + place + "`, byte " + std::to_string(at_) + ")");
}

}  // namespace exportkit
