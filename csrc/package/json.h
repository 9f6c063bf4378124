// A reader of JSON from strangers, which goes through a text once and keeps nothing of it. It takes RFC 8259, with
// nothing added. It is ours because parsers differ where it matters: keys that are there twice, 1.0 for an integer, a
// NUL or a byte order mark, numbers beyond 64 bits, halves of surrogate pairs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace exportkit {

// A text of these many brackets and commas would take a hundred times its size in memory.
inline constexpr size_t kMaxJsonValues = 2'000'000;

// The text is no JSON, or not of the shape that was asked for. The message says where.
struct JsonError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class JsonReader {
 public:
  enum class Kind { kObject, kArray, kString, kNumber, kBool, kNull };

  // `text` must outlive the reader. Nothing is read yet but that it is UTF-8: JsonError.
  JsonReader(std::string_view text, int max_depth);

  // What comes next.
  Kind peek();

  // Each of these takes the next value: JsonError where it is of another kind.
  // Calls on_member(key) for each member of an object, which takes the value.
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
  // Calls on_item() for each item of an array, which takes it.
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
  // An integer, not written as 1.0 or 1e0. JsonError where it does not fit.
  int64_t integer();
  // A number, however written, that is finite in double precision.
  double number();
  // Whether the number that comes next is written as an integer.
  bool at_integer();
  bool boolean();
  void null();
  // The number as it is written; its kind is checked, not its size.
  std::string_view number_text();
  // Any value, looked through for keys that are there twice, and counted: JsonError.
  void skip();
  // Nothing but whitespace may follow.
  void end();

  // Goes into the object that comes next, up to the value of a key; false, behind the object, if it has none.
  bool seek(std::string_view key);

  // What the text holds that is JSON, but which no value of ours has: a half of a surrogate pair, a number that is
  // infinite. Empty if nothing was seen yet.
  std::string oddity() const;
  // The one of both that is refused even in a value that is passed over.
  bool has_half_pair() const { return half_pair_; }

  // JsonError that names the place of the value that is being read.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  struct Step {
    std::string_view key;  // of an object's member; empty data for an array's item
    size_t index;
  };

  void count_value();
  void whitespace();
  void expect(std::string_view word);
  void enter(char bracket, const char* what);
  bool more(bool first, char bracket);
  std::string key();
  char32_t hex4();
  void escape(std::string& out);
  [[noreturn]] void expected(const char* what);

  std::string_view text_;
  size_t at_ = 0;
  int depth_ = 0, max_depth_;
  size_t values_ = 0;
  std::vector<Step> path_;
  bool half_pair_ = false, infinite_ = false;
};

}  // namespace exportkit
