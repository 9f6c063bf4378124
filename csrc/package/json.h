// A strict reader for untrusted JSON, which goes through a text once and stores nothing. It accepts RFC 8259 and no
// extensions. We use our own reader because parsers differ where it matters: duplicate keys, 1.0 for an integer, a NUL
// or a byte order mark, numbers beyond 64 bits, halves of surrogate pairs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace exportkit {

// A text of that many brackets and commas would take a hundred times its size in memory.
inline constexpr size_t kMaxJsonValues = 2'000'000;

// The text is not JSON, or not of the requested shape. The message says where.
struct JsonError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class JsonReader {
 public:
  enum class Kind { kObject, kArray, kString, kNumber, kBool, kNull };

  // `text` must outlive the reader. Checks only that it is UTF-8: JsonError.
  JsonReader(std::string_view text, int max_depth);
  // A reader of a text that is one value, in which no key appears twice and nothing is an `oddity`: JsonError.
  static JsonReader checked(std::string_view text, int max_depth);

  // The kind of the next value.
  Kind peek();

  // Each of these reads the next value: JsonError if it has another kind.
  // Calls on_member(key) for each member of an object; on_member reads the value.
  template <class F>
  void object(const F& on_member) {
    enter('{', "object");
    for (bool first = true; more(first, '}'); first = false) {
      const std::string key = this->key();
      path_.push_back({key, 0});
      on_member(std::string_view(key));
      path_.pop_back();
    }
    --depth_;
  }
  // Calls on_item() for each item of an array; on_item reads the item.
  template <class F>
  void array(const F& on_item) {
    enter('[', "array");
    path_.push_back({{}, 0});
    for (bool first = true; more(first, ']'); first = false) {
      on_item();
      ++path_.back().index;
    }
    path_.pop_back();
    --depth_;
  }
  std::string string();
  // A string of 64 hexadecimal digits in lower case.
  std::string sha256();
  // An integer, not written as 1.0 or 1e0. JsonError if it does not fit.
  int64_t integer();
  // A number in any notation that is finite in double precision.
  double number();
  // Whether the next number is written as an integer.
  bool at_integer();
  bool boolean();
  void null();
  // The number as written; its syntax is checked, not its size.
  std::string_view number_text();
  // Skips a value, but refuses duplicate keys and too many values: JsonError.
  void skip();
  // Skips a value in the same way and returns its text.
  std::string_view skipped();
  // Checks that only whitespace follows.
  void end();

  // Enters the next object up to the value of a key. If the key is missing, returns false after the object.
  bool seek(std::string_view key);

  // Describes a value seen so far that is valid JSON but never allowed here: half of a surrogate pair, or an infinite
  // number. Empty if there was none.
  std::string oddity() const;
  // Whether half of a surrogate pair was seen, which is refused even in a skipped value.
  bool has_half_pair() const { return half_pair_; }

  // Throws JsonError with the place of the value being read.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  struct Step {
    std::string_view key;  // of an object's member; data() is null for an array's item
    size_t index;
  };

  void count_value();
  void whitespace();
  void expect(std::string_view word);
  void enter(char bracket, std::string_view what);
  bool more(bool first, char bracket);
  std::string key();
  char32_t hex4();
  void escape(std::string& out);
  [[noreturn]] void expected(std::string_view what);

  std::string_view text_;
  size_t at_ = 0;
  int depth_ = 0, max_depth_;
  size_t values_ = 0;
  std::vector<Step> path_;
  bool half_pair_ = false, infinite_ = false;
};

}  // namespace exportkit
