// The tensors of recorded cases.
#include <algorithm>
#include <map>
#include <optional>
#include <ranges>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "package/accuracy.h"
#include "package/consistency.h"
#include "package/errors.h"
#include "package/manifest_checks.h"
#include "package/safetensors.h"
#include "package/text.h"

namespace exportkit {
namespace {

using safetensors::Place;
using Sizes = std::map<std::string, int64_t>;  // by dimension; the manifest was checked, so that each has one
using Shape = std::vector<int64_t>;

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
    const auto fits = [](int64_t size, int64_t wanted) { return wanted == kAnySize || size == wanted; };
    if (place.dtype == dtype && std::ranges::equal(place.shape, shape, fits)) return place;
    throw error(": " + name + " (" + printable(what) + ") is " + kind_text(place.dtype, place.shape) +
                "; the manifest says " + kind_text(dtype, shape));
  }

  // Takes the reference of a tensor, if there is one by its name among `accuracies`.
  void take_reference(const std::string& name, const std::string& result, std::string_view dtype, const Place& of,
                      const std::unordered_map<std::string_view, bool>& floating) {
    const auto found = floating.find(result);
    if (found == floating.end()) return;
    take(name, result, found->second ? reference_dtype(dtype) : dtype, of.shape);
  }

  void check_empty() const {
    if (left_.empty()) return;
    throw error(" has an unexpected tensor: " + printable(std::ranges::min(left_ | std::views::keys)));
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

// What may have a reference: an output, what a call writes into an input, or a state.
struct Result {
  std::string_view dtype;
  const std::optional<std::string>* rows_of;  // of an output's tolerance
};
using Results = std::unordered_map<std::string, Result>;

// What a case is compared with. It is made once for a method: a manifest may have many cases.
struct Expected {
  const Method* method;
  Dimensions dimensions;
  Results results;
};

std::unordered_map<std::string_view, Expected> expected_of(const Manifest& manifest) {
  std::unordered_map<std::string_view, Expected> all;
  for (const Method& method : manifest.methods) {
    Expected& one = all[method.name];
    one.method = &method;
    one.dimensions = dimensions_of(method.call);
    for (const TensorOutput& output : method.call.outputs) {
      one.results.emplace(output.name, Result{output.dtype, &output.tolerance.rows_of});
    }
    for (const TensorInput& input : method.call.inputs) {
      if (input.written) one.results.emplace(written_name(input), Result{input.dtype, &input.written->rows_of});
    }
  }
  return all;
}

// Checks the references that a call or the final state has.
void check_accuracy(const Accuracies& accuracies, const Results& results, const std::string& what, const char* kind) {
  Names given;
  for (const auto& [name, accuracy] : accuracies) given.insert(name);
  for (const auto& [name, accuracy] : accuracies) {
    const auto found = results.find(name);
    require(found != results.end(), what, " has a reference of ", Quoted{name}, ", which is not ", kind);
    const Result& result = found->second;
    const bool floating = is_floating(result.dtype);
    require(accuracy.has_value() == floating, what, ": the accuracy of ", Quoted{name}, ", which is ", result.dtype,
            ", must ", (floating ? "not be null" : "be null"));
    const std::optional<std::string>& rows_of = *result.rows_of;
    require(!floating || !rows_of || given.contains(*rows_of), what, ": ", Quoted{name},
            " has a reference, but its indices have none");
  }
}

void check_sizes(const CaseCall& call, const Dimensions& dimensions, const std::string& what) {
  // Names are unique, so the same number of declared names means the same names.
  require(call.sizes.size() == dimensions.size(), what, " gives sizes for ", call.sizes.size(), " dimensions of ",
          dimensions.size());
  for (const auto& [name, size] : call.sizes) {
    const auto found = dimensions.find(name);
    require(found != dimensions.end(), what, " has a size for ", name, ", which is not a dimension");
    require(found->second->min <= size && size <= found->second->max, what, " has ", name, " = ", size, ", outside ",
            found->second->min, " to ", found->second->max);
  }
}

// Checks that the calls of a case can be those of one session, whose state has one size.
void check_session(const Case& recorded, const std::unordered_map<std::string_view, Expected>& expected,
                   const Names& state_dimensions, const std::string& what) {
  bool stateful = false;
  std::unordered_map<std::string_view, int64_t> sizes;
  for (const CaseCall& call : recorded.calls) {
    stateful = stateful || !expected.at(call.method).method->state.empty();
    for (const auto& [name, size] : call.sizes) {
      if (!state_dimensions.contains(name)) continue;
      const int64_t first = sizes.emplace(name, size).first->second;
      require(first == size, what, " has ", name, " = ", first, " in one call and ", size,
              " in another; the state of a session has one size");
    }
  }
  if (!stateful) {
    require(recorded.calls.size() == 1, what, " has ", recorded.calls.size(),
            " calls of methods without state; such calls are a case each");
    require(recorded.state_accuracy.empty(), what, " has a reference of state, but calls no method that has state");
    return;
  }
  for (const std::string_view name : state_dimensions) {
    require(sizes.contains(name), what, " has no call with the dimension ", name,
            ", so the size of the state is unknown");
  }
}

}  // namespace

void check_case(const Manifest& manifest, const Case& recorded, std::string_view content) {
  std::vector<Place> places;
  try {
    places = safetensors::parse_header(content, content.size());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kCase, recorded.record + " is not a safetensors file: " + error.what());
  }
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

void check_cases(const Manifest& manifest) {
  distinct(manifest.cases, kRecord, "case");
  const auto expected = expected_of(manifest);
  Results state;
  Names state_dimensions;
  for (const StateTensor& one : manifest.state) {
    state.emplace(one.name, Result{one.dtype, &one.tolerance.rows_of});
    if (const Size* rows = rows_of(one)) state_dimensions.insert(rows->dimension);
  }
  for (const Case& recorded : manifest.cases) {
    const std::string what = "case " + shown(recorded.record);
    require(!recorded.calls.empty(), what, " has no call");
    bool has_references = !recorded.state_accuracy.empty();
    for (size_t i = 0; i < recorded.calls.size(); ++i) {
      const CaseCall& call = recorded.calls[i];
      const std::string which = what + ", call " + std::to_string(i);
      const auto found = expected.find(call.method);
      require(found != expected.end(), which, " is of ", Quoted{call.method}, ", which is not a method");
      check_sizes(call, found->second.dimensions, which);
      check_accuracy(call.accuracy, found->second.results, which, "an output or written");
      has_references = has_references || !call.accuracy.empty();
    }
    check_session(recorded, expected, state_dimensions, what);
    check_accuracy(recorded.state_accuracy, state, what, "state");
    require(has_references == recorded.reference_dtype.has_value(), what,
            " must have a reference_dtype if it has references, and only then");
  }
}

}  // namespace exportkit
