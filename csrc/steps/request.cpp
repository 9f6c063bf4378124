#include "steps/request.h"

#include <algorithm>

namespace exportkit::steps {
namespace {

constexpr char kId = 0x1A, kParameter = 0x22, kData = 0x3A;       // the first byte of these fields of a request
constexpr char kKey = 0x0A, kValue = 0x12;                        // of an entry of its parameters
constexpr char kTruth = 0x08, kWholeNumber = 0x10, kText = 0x1A;  // of a parameter
constexpr size_t kMostHead = 512, kMostId = 128, kMostRequestId = 127;

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// A length-delimited field. Returns false if it does not end within the message.
bool read_field(std::string_view message, size_t& at, std::string_view& value) {
  uint64_t size = 0;
  ++at;  // its first byte
  if (!read_varint(message, at, size) || size > message.size() - at) return false;
  value = message.substr(at, size);
  at += size;
  return true;
}

bool read_truth(std::string_view value, bool& truth) {
  if (value.size() != 2 || value[0] != kTruth || static_cast<unsigned char>(value[1]) > 1) return false;
  truth = value[1] == 1;
  return true;
}

bool read_id(std::string_view value, Step& step) {
  if (value.empty()) return false;
  size_t at = 1;
  if (value[0] == kWholeNumber) {
    step.is_number = true;
    return read_varint(value, at, step.number) && at == value.size() && step.number && step.number >> 63 == 0;
  }
  at = 0;
  return value[0] == kText && read_field(value, at, step.text) && at == value.size() && !step.text.empty() &&
         step.text.size() <= kMostId && is_ascii(step.text);
}

// What was read of a request's parameters: each of the sequence's may be there once.
struct Seen {
  bool id = false, start = false, end = false;
};

bool first(bool& seen) {
  const bool before = seen;
  seen = true;
  return !before;
}

// Reads a parameter. Returns false if protobuf has to; `own` says whether it is one of the sequence's.
bool read_parameter(std::string_view entry, Seen& seen, Step& step, bool& own) {
  size_t at = 0;
  std::string_view key, value;
  if (entry.empty() || entry[0] != kKey || !read_field(entry, at, key)) return false;
  if (at >= entry.size() || entry[at] != kValue || !read_field(entry, at, value) || at != entry.size()) return false;
  own = true;
  if (key == "sequence_id") return first(seen.id) && read_id(value, step);
  if (key == "sequence_start") return first(seen.start) && read_truth(value, step.start);
  if (key == "sequence_end") return first(seen.end) && read_truth(value, step.end);
  own = false;
  return true;
}

}  // namespace

bool read_varint(std::string_view message, size_t& at, uint64_t& value) {
  value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    if (at >= message.size()) return false;
    const auto byte = static_cast<unsigned char>(message[at++]);
    if (shift == 63 && byte > 1) return false;
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

bool read_step(std::string_view message, std::string& form, Step& step) {
  form.clear();
  step = {};
  Seen seen;
  bool has_request_id = false;
  size_t at = 0;
  while (at < message.size() && message[at] != kData) {
    const size_t start = at;
    const auto kind = static_cast<unsigned char>(message[at]);
    if (kind >= 0x38 || kind < 8 || (kind & 7) != 2) return false;  // the fields 1 to 6 are texts and messages
    std::string_view value;
    if (!read_field(message, at, value) || at > kMostHead) return false;
    bool own = false;
    if (message[start] == kId) {
      if (!first(has_request_id) || value.size() > kMostRequestId || !is_ascii(value)) return false;
      step.request_id = value;
      own = true;
    } else if (message[start] == kParameter && !read_parameter(value, seen, step, own)) {
      return false;
    }
    if (!own) form.append(message.substr(start, at - start));
  }
  step.data = at;
  return seen.id;
}

void append_field_head(std::string& out, unsigned number, size_t size) {
  out.push_back(static_cast<char>(number << 3 | 2));  // the field's number is below 16
  for (; size >= 0x80; size >>= 7) out.push_back(static_cast<char>((size & 0x7F) | 0x80));
  out.push_back(static_cast<char>(size));
}

}  // namespace exportkit::steps
