#include "package/safetensors.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "package/json_fields.h"
#include "package/text.h"

namespace exportkit::safetensors {

namespace {

constexpr int kMaxDepth = 127;  // the limit of serde_json, with which the reference implementation reads headers
constexpr size_t kLengthBytes = 8;

struct Dtype {
  std::string_view word, torch;
  size_t size;
};
// The dtypes that exportkit reads and writes. The reference implementation sorts by this order: larger alignments last.
constexpr Dtype kDtypes[] = {
    {"BOOL", "bool", 1},
    {"U8", "uint8", 1},
    {"I8", "int8", 1},
    {"F8_E5M2", "float8_e5m2", 1},
    {"F8_E4M3", "float8_e4m3fn", 1},
    {"F8_E4M3FNUZ", "float8_e4m3fnuz", 1},
    {"F8_E5M2FNUZ", "float8_e5m2fnuz", 1},
    {"I16", "int16", 2},
    {"U16", "uint16", 2},
    {"F16", "float16", 2},
    {"BF16", "bfloat16", 2},
    {"I32", "int32", 4},
    {"U32", "uint32", 4},
    {"F32", "float32", 4},
    {"C64", "complex64", 8},
    {"F64", "float64", 8},
    {"I64", "int64", 8},
    {"U64", "uint64", 8},
};

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

const Dtype* dtype_named(std::string_view name, std::string_view Dtype::* by = &Dtype::torch) {
  const auto* found = std::ranges::find(kDtypes, name, by);
  return found == std::end(kDtypes) ? nullptr : found;
}

// The size of a tensor in bytes. The shape is untrusted: the product may not fit.
uint64_t byte_count(const std::vector<int64_t>& shape, size_t item, const std::string& name) {
  unsigned __int128 count = item;
  for (const int64_t size : shape) {
    count *= static_cast<uint64_t>(size);
    if (count > std::numeric_limits<uint64_t>::max())
      refuse("tensor " + shown(name) + " has a shape that is too large");
  }
  return static_cast<uint64_t>(count);
}

int64_t natural(JsonReader& json) {
  JsonReader ahead = json;
  if (ahead.number_text().front() == '-') json.fail("expected a number that is at least 0");
  return json.integer();
}

// Reads one tensor, with offsets from the end of the header. Ignores unknown keys, as the reference implementation
// does.
Place place(JsonReader& json, std::string_view name) {
  Place out{std::string(name), {}, {}, 0, 0};
  const auto read_dtype = [&] {
    const std::string word = json.string();
    const Dtype* found = dtype_named(word, &Dtype::word);
    if (!found) json.fail("unknown dtype " + shown(word));
    out.dtype = found->torch;
  };
  const auto read_offsets = [&] {
    const std::vector<int64_t> offsets = list(natural)(json);
    if (offsets.size() != 2) json.fail("expected two offsets");
    out.begin = static_cast<uint64_t>(offsets[0]), out.end = static_cast<uint64_t>(offsets[1]);
  };
  read_members(
      json,
      {{"dtype", read_dtype}, {"shape", [&] { out.shape = list(natural)(json); }}, {"data_offsets", read_offsets}});
  return out;
}

Metadata metadata(JsonReader& json) { return nullable(map_of(text))(json).value_or(Metadata()); }

// Checks that the data are the tensors' data, one after the other, and nothing else.
void check_places(std::vector<Place>& places, uint64_t start, uint64_t file_size) {
  std::ranges::sort(places, {}, [](const Place& place) { return std::pair(place.begin, place.end); });
  uint64_t at = 0;
  for (Place& place : places) {
    const std::string what = "tensor " + shown(place.name);
    if (place.begin != at || place.end < place.begin) {
      refuse(concat(what, " has its data from ", place.begin, " to ", place.end, ", not from ", at,
                    " where the previous data end: data overlap, or there is a hole"));
    }
    const uint64_t bytes = byte_count(place.shape, item_size(place.dtype), place.name);
    if (place.end - place.begin != bytes) {
      refuse(concat(what, " has ", place.end - place.begin, " bytes; its dtype and shape need ", bytes));
    }
    at = place.end;
    place.begin += start;  // cannot overflow: offsets are below 2^63, and a header is small
    place.end += start;
  }
  if (at != file_size - start) {
    refuse(concat("the tensors end at byte ", at, " of ", file_size - start, " bytes of data"));
  }
  std::ranges::sort(places, {}, &Place::name);
}

}  // namespace

size_t item_size(std::string_view dtype) {
  const Dtype* found = dtype_named(dtype);
  return found ? found->size : 0;
}

uint64_t header_size(std::string_view first_eight) {
  if (first_eight.size() < kLengthBytes) refuse("it is too short for a safetensors file");
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{static_cast<uint8_t>(first_eight[i])} << (8 * i);
  if (length > kMaxHeaderBytes) {
    refuse(concat("the header has ", length, " bytes; at most ", kMaxHeaderBytes, " are read"));
  }
  return kLengthBytes + length;
}

std::vector<Place> parse_header(std::string_view file, uint64_t file_size) {
  const uint64_t start = header_size(file);
  if (start > file.size() || start > file_size)
    refuse("the header should end at byte " + std::to_string(start) + " of " + std::to_string(file_size));
  try {
    JsonReader json = JsonReader::checked(file.substr(kLengthBytes, start - kLengthBytes), kMaxDepth);
    std::vector<Place> places;
    json.object([&](std::string_view key) {
      if (key == "__metadata__") return void(metadata(json));
      places.push_back(place(json, key));
    });
    check_places(places, start, file_size);
    return places;
  } catch (const JsonError& error) {
    refuse(std::string("the header is not a safetensors header: ") + error.what());
  }
}

Metadata parse_metadata(std::string_view file) {
  JsonReader json(file.substr(kLengthBytes, header_size(file) - kLengthBytes), kMaxDepth);
  return json.seek("__metadata__") ? metadata(json) : Metadata();
}

std::vector<View> parse(std::string_view file) {
  std::vector<View> views;
  for (Place& place : parse_header(file, file.size())) {
    views.push_back({std::move(place.name), std::move(place.dtype), std::move(place.shape),
                     file.substr(place.begin, place.end - place.begin)});
  }
  return views;
}

std::pair<std::string, std::vector<const View*>> header(std::span<const View> tensors, const Metadata& metadata) {
  std::vector<const View*> ordered;
  for (const View& view : tensors) {
    const Dtype* dtype = dtype_named(view.dtype);
    if (!dtype) refuse("safetensors has no dtype " + shown(view.dtype));
    if (!is_utf8(view.name) || view.name == "__metadata__") refuse("a tensor cannot have the name " + shown(view.name));
    for (const int64_t size : view.shape) {
      if (size < 0) refuse("tensor " + shown(view.name) + " has a negative size");
    }
    if (byte_count(view.shape, dtype->size, view.name) != view.data.size()) {
      refuse("tensor " + shown(view.name) + " does not have the number of bytes that its dtype and shape need");
    }
    ordered.push_back(&view);
  }
  // The largest alignment first, so that every tensor is aligned; then by name.
  std::ranges::sort(ordered, [](const View* one, const View* other) {
    const Dtype *left = dtype_named(one->dtype), *right = dtype_named(other->dtype);
    return left != right ? left > right : one->name < other->name;
  });
  JsonMembers members;
  if (!metadata.empty()) {
    JsonMembers texts;
    for (const auto& [key, value] : metadata) texts.emplace_back(key, json_text(value));
    members.emplace_back("__metadata__", json_object(texts));
  }
  uint64_t at = 0;
  const auto number = [](int64_t size) { return std::to_string(size); };
  for (const View* view : ordered) {
    const uint64_t end = at + view->data.size();
    members.emplace_back(view->name, json_object({{"dtype", json_text(dtype_named(view->dtype)->word)},
                                                  {"shape", json_list(view->shape, number)},
                                                  {"data_offsets", "[" + number(at) + "," + number(end) + "]"}}));
    at = end;
  }
  std::string text = json_object(members);
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string out;
  for (size_t i = 0; i < kLengthBytes; ++i) out += static_cast<char>(uint64_t{text.size()} >> (8 * i) & 0xFF);
  return {out + text, ordered};
}

std::string serialize(std::span<const View> tensors, const Metadata& metadata) {
  auto [out, ordered] = header(tensors, metadata);
  for (const View* view : ordered) out += view->data;
  return out;
}

}  // namespace exportkit::safetensors
