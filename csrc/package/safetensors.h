// Tensors in the safetensors format: https://huggingface.co/docs/safetensors. Works without torch, on bytes, shapes and
// torch's names of dtypes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace exportkit::safetensors {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

// A tensor in a buffer that the caller owns.
struct View {
  std::string name;
  std::string dtype;  // torch's name without `torch.`, such as "float32"
  std::vector<int64_t> shape;
  std::string_view data;  // contiguous, little-endian
};

// A tensor's place in a file, for a caller that maps or reads the data itself.
struct Place {
  std::string name, dtype;
  std::vector<int64_t> shape;
  uint64_t begin, end;  // in the file
};

// The tensors of a whole file, sorted by name. std::invalid_argument: the header is too large, is not JSON or repeats a
// key; a dtype is unknown; data overlap, leave holes, or have a size that differs from dtype times shape.
std::vector<View> parse(std::string_view file);

// The same from the header alone: `file` begins with the header, `file_size` is the size of the whole file.
std::vector<Place> parse_header(std::string_view file, uint64_t file_size);

// The texts of a header's `__metadata__`, by key. `file` begins with a header that `parse_header` accepts.
using Metadata = std::map<std::string, std::string>;
Metadata parse_metadata(std::string_view file);

// The size of a file's header, from the file's first eight bytes: std::invalid_argument if it is too large.
uint64_t header_size(std::string_view first_eight);

// The bytes of a file up to the data, and the tensors in the order in which their data follow. The same tensors give
// the same bytes in any order.
std::pair<std::string, std::vector<const View*>> header(std::span<const View> tensors, const Metadata& metadata = {});
std::string serialize(std::span<const View> tensors, const Metadata& metadata = {});

// The size of one element in bytes; 0 for a dtype that safetensors does not have.
size_t item_size(std::string_view dtype);

}  // namespace exportkit::safetensors
