// Reads a ModelInferRequest that is a step of a sequence, without protobuf: exportkit/serve/rpc/step_heads.py has the
// same rules, and a test compares the two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace exportkit::steps {

// A step. The views are of the message.
struct Step {
  std::string_view request_id;
  bool is_number = false;  // of the sequence's id
  uint64_t number = 0;
  std::string_view text;
  bool start = false;
  bool end = false;
  size_t data = 0;  // where `raw_input_contents` begin
};

// Reads what stands before the elements of the inputs. `form` gets its bytes without what the steps of one client may
// differ in: the request's id, and the sequence's parameters. Returns false where protobuf has to read the message: all
// that is not exactly as clients write it.
bool read_step(std::string_view message, std::string& form, Step& step);

// Reads a number of a message. Returns false if it does not end within the message, or has more than 64 bits.
bool read_varint(std::string_view message, size_t& at, uint64_t& value);

// Appends what stands before the bytes of a field.
void append_field_head(std::string& out, unsigned number, size_t size);

}  // namespace exportkit::steps
