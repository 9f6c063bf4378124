#include "runtime/cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <span>

#include "package/accuracy.h"
#include "package/errors.h"
#include "runtime/inputs.h"
#include "runtime/tensors.h"

namespace exportkit {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// --- reading -------------------------------------------------------------------------------------------------------

std::optional<int64_t> size_in(const Case& recorded, const Extent& extent) {
  if (const auto* fixed = std::get_if<int64_t>(&extent)) return *fixed;
  const auto& size = std::get<Size>(extent);
  for (const auto& [dimension, number] : recorded.sizes) {
    if (dimension == size.dimension) return size_at(size, number);
  }
  return std::nullopt;
}

std::vector<std::optional<int64_t>> sizes_in(const Case& recorded, const TensorInput& input) {
  std::vector<std::optional<int64_t>> sizes;
  for (const Extent& extent : input.shape) sizes.push_back(size_in(recorded, extent));
  return sizes;
}

std::vector<std::optional<int64_t>> sizes_in(const Case& recorded, const TensorOutput& output) {
  std::vector<std::optional<int64_t>> sizes;
  for (const auto& extent : output.shape) sizes.push_back(extent ? size_in(recorded, *extent) : std::nullopt);
  return sizes;
}

// Removes the case's inputs or outputs from `tensors` and returns them: CaseError.
template <class Described>
std::vector<at::Tensor> take(const Case& recorded, const std::string& kind, const std::vector<Described>& described,
                             Tensors& tensors, c10::Device device) {
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < described.size(); ++i) {
    const std::string name = kind + "." + std::to_string(i);
    auto node = tensors.extract(name);
    if (node.empty()) throw Error(errors::kCase, recorded.record + " has no " + name + " (" + described[i].name + ")");
    const at::Tensor& tensor = node.mapped();
    const auto sizes = sizes_in(recorded, described[i]);
    bool fits =
        static_cast<size_t>(tensor.dim()) == sizes.size() && dtype_of(described[i].dtype) == tensor.scalar_type();
    for (size_t axis = 0; fits && axis < sizes.size(); ++axis) {
      fits = !sizes[axis] || *sizes[axis] == tensor.size(static_cast<int64_t>(axis));
    }
    if (!fits) {
      std::string wanted;
      for (const auto& size : sizes) wanted += (wanted.empty() ? "" : ", ") + (size ? std::to_string(*size) : "*");
      throw Error(errors::kCase, recorded.record + ": " + name + " (" + described[i].name + ") is " + describe(tensor) +
                                     "; the manifest says " + described[i].dtype + "[" + wanted + "]");
    }
    found.push_back(tensor.to(device));
  }
  return found;
}

// Removes the case's references from `tensors` and returns them by output: CaseError.
Tensors take_references(const Case& recorded, const Call& call, Tensors& tensors,
                        const std::vector<at::Tensor>& eager) {
  Tensors found;
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const TensorOutput& output = call.outputs[i];
    for (const auto& [name, accuracy] : recorded.accuracy) {
      if (name != output.name) continue;
      const std::string tensor_name = "reference." + std::to_string(i);
      auto node = tensors.extract(tensor_name);
      const std::string dtype(accuracy ? reference_dtype(output.dtype) : output.dtype);
      if (node.empty() || node.mapped().scalar_type() != dtype_of(dtype) ||
          !node.mapped().sizes().equals(eager[i].sizes())) {
        throw Error(errors::kCase, recorded.record + " must have a " + tensor_name + " (" + name + ") of " + dtype +
                                       " and the sizes of " + describe(eager[i]));
      }
      found.emplace(name, std::move(node.mapped()));
    }
  }
  return found;
}

// --- comparing -----------------------------------------------------------------------------------------------------

struct Difference {
  at::Tensor distance;   // |actual - expected|; 0 if both are NaN or the same infinity, infinite if only one is
  at::Tensor magnitude;  // |expected|
};

// Computes the difference in float64.
Difference difference(const at::Tensor& expected, const at::Tensor& actual) {
  // int64 values are subtracted first, because float64 would round their difference away.
  if (expected.scalar_type() == at::kLong || expected.scalar_type() == at::kUInt64) {
    const auto distance = (actual.to(at::kLong) - expected.to(at::kLong)).abs().to(at::kDouble);
    return {distance, expected.to(at::kDouble).abs()};
  }
  const at::ScalarType wide = expected.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor wanted = expected.to(wide), given = actual.to(wide);
  const at::Tensor same = wanted.eq(given).logical_or(wanted.isnan().logical_and(given.isnan()));
  const at::Tensor distance = (given - wanted).abs().masked_fill(same, 0.0);
  return {distance.nan_to_num(kInfinity, kInfinity), wanted.abs().nan_to_num(0.0)};
}

int64_t count(const at::Tensor& mask) { return mask.sum().item<int64_t>(); }

std::optional<double> greatest(const at::Tensor& values, const at::Tensor& counts) {
  const at::Tensor selected = values.nan_to_num(0.0, kInfinity).masked_select(counts);
  return selected.numel() == 0 ? std::nullopt : std::optional(selected.max().item<double>());
}

OutputReport compare_values(const TensorOutput& output, const at::Tensor& expected, const at::Tensor& actual,
                            const at::Tensor& counts) {
  const auto& [rtol, atol, ranking_of, rows_of] = output.tolerance;
  const auto [distance, magnitude] = difference(expected, actual);
  // An infinite expected value would allow any difference.
  const at::Tensor wrong = distance.gt(magnitude * rtol + atol).logical_or(distance.isinf()).logical_and(counts);
  const at::Tensor relative = (distance / magnitude).masked_fill(distance.eq(0), 0.0);
  return {
      output.name, count(counts), count(wrong), rtol, atol, greatest(distance, counts), greatest(relative, counts), {},
      {}};
}

// Rows of an output [..., K, ...] that belong to indices [..., K], and which of them there are.
struct Rows {
  at::Tensor values, found;
};

// Returns the rows of `values` that belong to the given indices, in their order.
Rows rows_at(const at::Tensor& values, const at::Tensor& indices, const at::Tensor& given) {
  const int64_t axis = given.dim() - 1, count = given.size(-1);
  const auto wide = [&](at::Tensor mask) {
    while (mask.dim() < values.dim()) mask = mask.unsqueeze(-1);
    return mask.expand(values.sizes());
  };
  if (count == 0) return {values, wide(at::zeros_like(given, at::kBool))};
  const auto [ordered, order] = indices.sort(std::optional<bool>(true), -1, false);
  const at::Tensor place = at::searchsorted(ordered, given.contiguous()).clamp(0, count - 1);
  const at::Tensor found = ordered.gather(-1, place).eq(given);
  return {values.gather(axis, wide(order.gather(-1, place))), wide(found)};
}

OutputReport compare_rows(const TensorOutput& output, const Tensors& expected, const Tensors& actual) {
  const std::string& rows_of = *output.tolerance.rows_of;
  const at::Tensor& wanted = expected.at(output.name);
  at::Tensor agree = expected.at(rows_of).eq(actual.at(rows_of));
  const std::string note = std::to_string(count(agree)) + " of " + std::to_string(agree.numel()) +
                           " rows compared: those whose `" + rows_of + "` agree";
  while (agree.dim() < wanted.dim()) agree = agree.unsqueeze(-1);
  OutputReport report = compare_values(output, wanted, actual.at(output.name), agree.expand(wanted.sizes()));
  if (report.compared < wanted.numel()) report.note = note;
  return report;
}

// What outputs are compared with: eager's answers, and the references of those that have one.
struct Expected {
  const Tensors &eager, &references;
  const std::map<std::string, Accuracy>& accuracy;  // eager's
};

// The elements in float64, in order.
std::span<const double> elements(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<double>(), static_cast<size_t>(tensor.numel())};
}

double typical_of(const at::Tensor& reference) {
  return typical_magnitude(elements(reference.to(at::kDouble).contiguous()));
}

OutputReport compare_with_reference(const TensorOutput& output, const Expected& expected, const Tensors& actual) {
  const at::Tensor& given = actual.at(output.name);
  Rows reference{expected.references.at(output.name), at::ones_like(given, at::kBool)};
  const double typical = typical_of(reference.values);
  const auto& rows_of = output.tolerance.rows_of;
  if (rows_of) reference = rows_at(reference.values, expected.references.at(*rows_of), actual.at(*rows_of));
  const Accuracy allowed = allowed_error(expected.accuracy.at(output.name), output.dtype);
  const at::Tensor wanted = reference.values.to(at::kDouble).contiguous(), values = given.to(at::kDouble).contiguous(),
                   counts = reference.found.to(at::kByte).contiguous();
  const MeasuredError error = measure_error(elements(wanted), elements(values).data(), counts.const_data_ptr<uint8_t>(),
                                            typical, allowed.greatest);
  OutputReport report = rows_of ? compare_rows(output, expected.eager, actual)
                                : compare_values(output, expected.eager.at(output.name), given, counts.to(at::kBool));
  report.compared = static_cast<int64_t>(error.compared), report.mismatched = static_cast<int64_t>(error.beyond);
  report.error = {error.size.rms, allowed.rms, error.size.greatest, allowed.greatest};
  report.note.clear();
  if (report.compared < given.numel()) {
    report.note = std::to_string(report.compared) + " of " + std::to_string(given.numel()) +
                  " elements compared: the rows of `" + *rows_of + "` that the reference has";
  }
  return report;
}

// Compares indices [..., K] that rank values [..., N]. The k-th greatest value moves by no more than the values
// themselves do. So the value that `actual` picked at place k must be within the values' tolerance of the value that
// `expected` picked there. The indices may differ: values closer than the tolerance may change places.
OutputReport compare_ranking(const TensorOutput& output, const OutputTolerance& tolerance, const Tensors& expected,
                             const Tensors& actual) {
  const std::string& of = *output.tolerance.ranking_of;
  const at::Tensor &wanted = expected.at(output.name), &given = actual.at(output.name);
  const int64_t values = expected.at(of).size(-1);
  const auto picked = [&](const at::Tensor& from, const at::Tensor& index) {
    return values > 0 ? from.gather(-1, index.clamp(0, values - 1)) : index.to(at::kDouble);
  };
  const auto [distance, magnitude] = difference(picked(expected.at(of), wanted), picked(actual.at(of), given));
  const at::Tensor too_far = distance.gt(magnitude * tolerance.rtol + tolerance.atol).logical_or(distance.isinf());
  const at::Tensor outside = given.lt(0).logical_or(given.ge(values));
  at::Tensor again = at::zeros_like(wanted, at::kBool);
  if (given.size(-1) > 1) {
    const auto [ordered, order] = given.sort(std::optional<bool>(true), -1, false);
    const int64_t last = given.size(-1) - 1;
    const at::Tensor twice = ordered.narrow(-1, 1, last).eq(ordered.narrow(-1, 0, last));
    at::Tensor repeated = at::zeros_like(again);
    repeated.narrow(-1, 1, last).logical_or_(twice);
    repeated.narrow(-1, 0, last).logical_or_(twice);
    again.scatter_(-1, order, repeated);
  }
  const at::Tensor differs = given.ne(wanted);
  const at::Tensor wrong = differs.logical_and(outside.logical_or(too_far).logical_or(again));
  OutputReport report{output.name, wanted.numel(), count(wrong), tolerance.rtol, tolerance.atol, {}, {}, {}, {}};
  const auto say = [&](const at::Tensor& mask, const std::string& what) {
    const int64_t number = count(mask);
    if (number > 0) report.note += (report.note.empty() ? "" : "; ") + std::to_string(number) + " indices " + what;
  };
  say(differs.logical_and(wrong.logical_not()), "differ where `" + of + "` ties within its tolerance");
  say(differs.logical_and(outside), "are outside 0.." + std::to_string(values - 1));
  say(differs.logical_and(again), "repeat");
  return report;
}

OutputReport compare_output(const TensorOutput& output, const std::vector<TensorOutput>& outputs,
                            const Expected& expected, const Tensors& actual) {
  const bool has_reference = expected.references.contains(output.name);
  for (const TensorOutput& ranked : outputs) {
    if (ranked.name != output.tolerance.ranking_of) continue;
    if (!has_reference || !expected.accuracy.contains(ranked.name)) {
      return compare_ranking(output, ranked.tolerance, expected.eager, actual);
    }
    // The places of a ranking are as uncertain as the values that it ranks.
    const double allowed = allowed_error(expected.accuracy.at(ranked.name), ranked.dtype).greatest;
    const double typical = typical_of(expected.references.at(ranked.name));
    return compare_ranking(output, {allowed, allowed * typical, {}, {}}, expected.references, actual);
  }
  if (has_reference && expected.accuracy.contains(output.name)) return compare_with_reference(output, expected, actual);
  if (output.tolerance.rows_of) return compare_rows(output, expected.eager, actual);
  const at::Tensor& wanted = expected.eager.at(output.name);
  return compare_values(output, wanted, actual.at(output.name), at::ones_like(wanted, at::kBool));
}

std::string shown(const std::optional<double>& value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value.value_or(0));
  return value ? text : "-";
}

// Eager's error by output: the greatest of all cases, because one call of few elements may happen to be exact.
std::map<std::string, Accuracy> accuracy_of_eager(const Manifest& manifest) {
  std::map<std::string, Accuracy> found;
  for (const Case& recorded : manifest.cases) {
    for (const auto& [name, accuracy] : recorded.accuracy) {
      if (!accuracy) continue;
      Accuracy& known = found[name];
      known = {std::max(known.rms, accuracy->rms), std::max(known.greatest, accuracy->greatest)};
    }
  }
  return found;
}

}  // namespace

RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device) {
  const Manifest& manifest = reader.manifest();
  const Case& recorded = manifest.cases.at(index);
  const std::string content = reader.read(recorded.record);
  Tensors tensors;
  try {
    tensors = parse_tensors(content);
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kCase, recorded.record + " is not a safetensors file: " + error.what());
  }
  RecordedCase read{{recorded.sizes.begin(), recorded.sizes.end()},
                    take(recorded, "input", manifest.call.inputs, tensors, device),
                    take(recorded, "output", manifest.call.outputs, tensors, device),
                    {}};
  read.references = take_references(recorded, manifest.call, tensors, read.outputs);
  if (!tensors.empty()) {
    throw Error(errors::kCase, recorded.record + " has an unexpected tensor: " + tensors.begin()->first);
  }
  return read;
}

CaseReport compare(const Manifest& manifest, const RecordedCase& recorded, const std::vector<at::Tensor>& actual) {
  const std::vector<TensorOutput>& outputs = manifest.call.outputs;
  CaseReport report;
  if (actual.size() != outputs.size()) {
    report.problem = "the call returned " + std::to_string(actual.size()) + " tensors; the manifest lists " +
                     std::to_string(outputs.size());
    return report;
  }
  Tensors eager, given;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& expected = recorded.outputs[i];
    if (actual[i].scalar_type() != expected.scalar_type() || !actual[i].sizes().equals(expected.sizes())) {
      report.problem = "`" + outputs[i].name + "` is " + describe(actual[i]) + "; expected " + describe(expected);
      return report;
    }
    eager.emplace(outputs[i].name, expected.detach().cpu());
    given.emplace(outputs[i].name, actual[i].detach().cpu());
  }
  const std::map<std::string, Accuracy> accuracy = accuracy_of_eager(manifest);
  for (const TensorOutput& output : outputs) {
    report.outputs.push_back(compare_output(output, outputs, {eager, recorded.references, accuracy}, given));
  }
  return report;
}

bool OutputReport::ok() const {
  return mismatched == 0 &&
         (!error || (error->rms <= error->rms_allowed && error->greatest <= error->greatest_allowed));
}

// How the output was judged: by its error against the reference, or by its difference from eager.
std::string OutputReport::text() const {
  const std::string differ =
      name + ": " + std::to_string(mismatched) + " of " + std::to_string(compared) + " elements differ";
  const std::string judged = error ? " (rms error " + shown(error->rms) + ", " + shown(error->rms_allowed) +
                                         " allowed; greatest " + shown(error->greatest) + ", " +
                                         shown(error->greatest_allowed) + " allowed)"
                                   : " (rtol " + shown(rtol) + ", atol " + shown(atol) + "; greatest difference " +
                                         shown(max_abs) + ", relative " + shown(max_rel) + ")";
  return differ + judged + (note.empty() ? "" : "; " + note);
}

bool CaseReport::ok() const {
  return problem.empty() &&
         std::all_of(outputs.begin(), outputs.end(), [](const OutputReport& output) { return output.ok(); });
}

}  // namespace exportkit
