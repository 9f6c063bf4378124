#include "package/case_tensors.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "package/accuracy.h"
#include "package/consistency.h"
#include "package/errors.h"
#include "package/text.h"

namespace exportkit {

namespace {

using safetensors::Place;
using Sizes = std::unordered_map<std::string_view, int64_t>;
using Shape = std::vector<std::optional<int64_t>>;  // nothing where any size is right

std::string shape_text(const Shape& shape) {
  std::string text;
  for (const auto& size : shape) text += (text.empty() ? "" : ", ") + (size ? std::to_string(*size) : "*");
  return "[" + text + "]";
}

// The manifest was checked: the dimension has a number, and the size fits.
std::optional<int64_t> size_at(const Extent& extent, const Sizes& sizes) {
  if (const auto* fixed = std::get_if<int64_t>(&extent)) return *fixed;
  const Size& size = std::get<Size>(extent);
  return static_cast<int64_t>(static_cast<__int128>(size.scale) * sizes.at(size.dimension) + size.offset);
}
std::optional<int64_t> size_at(const std::optional<Extent>& extent, const Sizes& sizes) {
  return extent ? size_at(*extent, sizes) : std::nullopt;
}

template <class Extents>
Shape shape_at(const Extents& extents, const Sizes& sizes) {
  Shape shape;
  for (const auto& extent : extents) shape.push_back(size_at(extent, sizes));
  return shape;
}

// The file of a case. Each tensor is taken once; what is left is too much.
class Tensors {
 public:
  Tensors(const Case& recorded, const std::vector<Place>& places) : record_(recorded.record) {
    for (const Place& place : places) left_.emplace(place.name, &place);
  }

  bool has(const std::string& name) const { return left_.contains(name); }

  // Takes a tensor that has this dtype and shape. `what` is what it is of.
  const Place& take(const std::string& name, const std::string& what, std::string_view dtype, const Shape& shape) {
    const auto node = left_.extract(name);
    if (node.empty()) throw error(" has no " + name + " (" + printable(what) + ")");
    const Place& place = *node.mapped();
    bool fits = place.dtype == dtype && place.shape.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = !shape[i] || *shape[i] == place.shape[i];
    if (!fits) {
      throw error(": " + name + " (" + printable(what) + ") is " + place.dtype +
                  shape_text({place.shape.begin(), place.shape.end()}) + "; the manifest says " + std::string(dtype) +
                  shape_text(shape));
    }
    return place;
  }

  // Takes the reference of a tensor, if there is one by its name among `accuracies`.
  void take_reference(const std::string& name, const std::string& result, std::string_view dtype, const Place& of,
                      const std::unordered_map<std::string_view, bool>& floating) {
    const auto found = floating.find(result);
    if (found == floating.end()) return;
    take(name, result, found->second ? reference_dtype(dtype) : dtype, {of.shape.begin(), of.shape.end()});
  }

  void check_empty() const {
    if (left_.empty()) return;
    const auto first = std::min_element(left_.begin(), left_.end(),
                                        [](const auto& one, const auto& other) { return one.first < other.first; });
    throw error(" has an unexpected tensor: " + printable(first->first));
  }

 private:
  Error error(const std::string& problem) const { return {errors::kCase, record_ + problem}; }

  const std::string& record_;
  std::unordered_map<std::string_view, const Place*> left_;
};

// What has a reference, and whether it is floating.
std::unordered_map<std::string_view, bool> references_of(const Accuracies& accuracies) {
  std::unordered_map<std::string_view, bool> found;
  for (const auto& [name, accuracy] : accuracies) found.emplace(name, accuracy.has_value());
  return found;
}

void take_call(const Call& call, const CaseCall& recorded, const std::string& number, Tensors& tensors) {
  const Sizes sizes(recorded.sizes.begin(), recorded.sizes.end());
  const auto references = references_of(recorded.accuracy);
  const auto name = [&](const char* kind, size_t i) { return number + "." + kind + "." + std::to_string(i); };
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const TensorInput& input = call.inputs[i];
    const Shape shape = shape_at(input.shape, sizes);
    tensors.take(name("input", i), input.name, input.dtype, shape);
    if (!input.written) continue;
    const Place& written = tensors.take(name("written", i), input.name, input.dtype, shape);
    tensors.take_reference(name("written_reference", i), written_name(input), input.dtype, written, references);
  }
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const TensorOutput& output = call.outputs[i];
    const Place& eager = tensors.take(name("output", i), output.name, output.dtype, shape_at(output.shape, sizes));
    tensors.take_reference(name("reference", i), output.name, output.dtype, eager, references);
  }
}

// Takes the whole state or none of it.
void take_state(const std::vector<StateTensor>& state, const Case& recorded, Tensors& tensors) {
  const auto references = references_of(recorded.state_accuracy);
  const auto name = [](size_t j) { return "state." + std::to_string(j); };
  bool some = !references.empty();
  for (size_t j = 0; !some && j < state.size(); ++j) some = tensors.has(name(j));
  if (!some) return;
  Sizes sizes;
  for (const CaseCall& call : recorded.calls) sizes.insert(call.sizes.begin(), call.sizes.end());
  for (size_t j = 0; j < state.size(); ++j) {
    const StateTensor& one = state[j];
    const Place& last = tensors.take(name(j), one.name, one.dtype, shape_at(one.shape, sizes));
    tensors.take_reference("state_reference." + std::to_string(j), one.name, one.dtype, last, references);
  }
}

}  // namespace

void check_case(const Manifest& manifest, const Case& recorded, const std::vector<Place>& places) {
  std::unordered_map<std::string_view, const Method*> methods;
  for (const Method& method : manifest.methods) methods.emplace(method.name, &method);
  Tensors tensors(recorded, places);
  bool stateful = false;
  for (size_t i = 0; i < recorded.calls.size(); ++i) {
    const Method& method = *methods.at(recorded.calls[i].method);
    stateful = stateful || !method.state.empty();
    take_call(method.call, recorded.calls[i], std::to_string(i), tensors);
  }
  if (stateful) take_state(manifest.state, recorded, tensors);
  tensors.check_empty();
}

void check_case(const Manifest& manifest, const Case& recorded, std::string_view content) {
  std::vector<Place> places;
  try {
    places = safetensors::parse_header(content, content.size());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kCase, recorded.record + " is not a safetensors file: " + error.what());
  }
  check_case(manifest, recorded, places);
}

}  // namespace exportkit
