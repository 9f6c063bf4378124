// The rules of recorded cases, as far as the manifest alone shows them.
#include <string>
#include <unordered_map>

#include "package/consistency.h"
#include "package/manifest_checks.h"

namespace exportkit {

namespace {

bool is_floating(std::string_view dtype) { return dtype.starts_with("float") || dtype == "bfloat16"; }

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
    require(found != results.end(),
            [&] { return what + " has a reference of " + shown(name) + ", which is not " + kind; });
    const Result& result = found->second;
    const bool floating = is_floating(result.dtype);
    require(accuracy.has_value() == floating, [&] {
      return what + ": the accuracy of " + shown(name) + ", which is " + std::string(result.dtype) + ", must " +
             (floating ? "not be null" : "be null");
    });
    const std::optional<std::string>& rows_of = *result.rows_of;
    require(!floating || !rows_of || given.contains(*rows_of),
            [&] { return what + ": " + shown(name) + " has a reference, but its indices have none"; });
  }
}

void check_sizes(const CaseCall& call, const Dimensions& dimensions, const std::string& what) {
  // Names are unique, so the same number of declared names means the same names.
  require(call.sizes.size() == dimensions.size(), [&] {
    return what + " gives sizes for " + std::to_string(call.sizes.size()) + " dimensions of " +
           std::to_string(dimensions.size());
  });
  for (const auto& given : call.sizes) {
    const std::string& name = given.first;
    const int64_t size = given.second;
    const auto found = dimensions.find(name);
    require(found != dimensions.end(), [&] { return what + " has a size for " + name + ", which is not a dimension"; });
    require(found->second->min <= size && size <= found->second->max, [&] {
      return what + " has " + name + " = " + std::to_string(size) + ", outside " + std::to_string(found->second->min) +
             " to " + std::to_string(found->second->max);
    });
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
      require(first == size, [&, &name = name, &size = size] {
        return what + " has " + name + " = " + std::to_string(first) + " in one call and " + std::to_string(size) +
               " in another; the state of a session has one size";
      });
    }
  }
  if (!stateful) {
    require(recorded.calls.size() == 1, [&] {
      return what + " has " + std::to_string(recorded.calls.size()) +
             " calls of methods without state; such calls are a case each";
    });
    require(recorded.state_accuracy.empty(),
            [&] { return what + " has a reference of state, but calls no method that has state"; });
    return;
  }
  for (const std::string_view name : state_dimensions) {
    require(sizes.contains(name), [&] {
      return what + " has no call with the dimension " + std::string(name) + ", so the size of the state is unknown";
    });
  }
}

}  // namespace

void check_cases(const Manifest& manifest) {
  distinct(manifest.cases, kRecord, "case");
  const auto expected = expected_of(manifest);
  const std::optional<std::string> none;
  Results state;
  Names state_dimensions;
  for (const StateTensor& one : manifest.state) {
    state.emplace(one.name, Result{one.dtype, &none});
    const auto* rows = one.shape.empty() ? nullptr : std::get_if<Size>(one.shape.data());
    if (rows) state_dimensions.insert(rows->dimension);
  }
  for (const Case& recorded : manifest.cases) {
    const std::string what = "case " + shown(recorded.record);
    require(!recorded.calls.empty(), [&] { return what + " has no call"; });
    bool has_references = !recorded.state_accuracy.empty();
    for (size_t i = 0; i < recorded.calls.size(); ++i) {
      const CaseCall& call = recorded.calls[i];
      const std::string which = what + ", call " + std::to_string(i);
      const auto found = expected.find(call.method);
      require(found != expected.end(),
              [&] { return which + " is of " + shown(call.method) + ", which is not a method"; });
      check_sizes(call, found->second.dimensions, which);
      check_accuracy(call.accuracy, found->second.results, which, "an output or written");
      has_references = has_references || !call.accuracy.empty();
    }
    check_session(recorded, expected, state_dimensions, what);
    check_accuracy(recorded.state_accuracy, state, what, "state");
    require(has_references == recorded.reference_dtype.has_value(),
            [&] { return what + " must have a reference_dtype if it has references, and only then"; });
  }
}

}  // namespace exportkit
