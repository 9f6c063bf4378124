// Tensors in the safetensors format: https://huggingface.co/docs/safetensors. No torch here: bytes, dtypes by torch's
// names, shapes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace exportkit::safetensors {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

// A tensor in a buffer that its owner keeps.
struct View {
  std::string name;
  std::string dtype;  // torch's name without `torch.`, such as "float32"
  std::vector<int64_t> shape;
  std::string_view data;  // contiguous, little-endian
};

// A file's header, without its data: what a caller needs to map or read the data itself.
struct Place {
  std::string name, dtype;
  std::vector<int64_t> shape;
  uint64_t begin, end;  // in the file
};

// The tensors of a whole file, by name in order. std::invalid_argument says what is wrong: a header that is too large,
// no JSON, or says something twice; unknown dtypes; data that overlap, have holes, or are not dtype times shape.
std::vector<View> parse(std::string_view file);

// The same for a file of which only the header is read: `file` begins with it, `file_size` is the whole's.
std::vector<Place> parse_header(std::string_view file, uint64_t file_size);

// How many bytes of a file its header takes, from the first eight: std::invalid_argument where that is too many.
uint64_t header_size(std::string_view first_eight);

// Writes a file: the bytes up to the data, and then each tensor's data in the order that is given back. The same
// tensors give the same bytes in whatever order they come.
std::pair<std::string, std::vector<const View*>> header(std::span<const View> tensors);
std::string serialize(std::span<const View> tensors);

// Bytes of one element; 0 for a dtype that safetensors does not know.
size_t item_size(std::string_view dtype);

}  // namespace exportkit::safetensors
