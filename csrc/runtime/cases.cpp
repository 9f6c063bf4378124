#include "runtime/cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

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
  return {output.name, count(counts), count(wrong), rtol, atol, greatest(distance, counts), greatest(relative, counts),
          {}};
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
    const auto [ordered, order] = given.sort(/*stable=*/true, -1);
    const int64_t last = given.size(-1) - 1;
    const at::Tensor twice = ordered.narrow(-1, 1, last).eq(ordered.narrow(-1, 0, last));
    at::Tensor repeated = at::zeros_like(again);
    repeated.narrow(-1, 1, last).logical_or_(twice);
    repeated.narrow(-1, 0, last).logical_or_(twice);
    again.scatter_(-1, order, repeated);
  }
  const at::Tensor differs = given.ne(wanted);
  const at::Tensor wrong = differs.logical_and(outside.logical_or(too_far).logical_or(again));
  OutputReport report{output.name, wanted.numel(), count(wrong), tolerance.rtol, tolerance.atol, {}, {}, {}};
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
                            const Tensors& expected, const Tensors& actual) {
  if (output.tolerance.ranking_of) {
    for (const TensorOutput& ranked : outputs) {
      if (ranked.name == *output.tolerance.ranking_of)
        return compare_ranking(output, ranked.tolerance, expected, actual);
    }
  }
  if (output.tolerance.rows_of) return compare_rows(output, expected, actual);
  const at::Tensor& wanted = expected.at(output.name);
  return compare_values(output, wanted, actual.at(output.name), at::ones_like(wanted, at::kBool));
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
                    take(recorded, "output", manifest.call.outputs, tensors, device)};
  if (!tensors.empty()) {
    throw Error(errors::kCase, recorded.record + " has an unexpected tensor: " + tensors.begin()->first);
  }
  return read;
}

CaseReport compare(const std::vector<TensorOutput>& outputs, const std::vector<at::Tensor>& expected,
                   const std::vector<at::Tensor>& actual) {
  CaseReport report;
  if (actual.size() != outputs.size()) {
    report.problem = "the call returned " + std::to_string(actual.size()) + " tensors; the manifest lists " +
                     std::to_string(outputs.size());
    return report;
  }
  Tensors wanted, given;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (actual[i].scalar_type() != expected[i].scalar_type() || !actual[i].sizes().equals(expected[i].sizes())) {
      report.problem = "`" + outputs[i].name + "` is " + describe(actual[i]) + "; expected " + describe(expected[i]);
      return report;
    }
    wanted.emplace(outputs[i].name, expected[i].detach().cpu());
    given.emplace(outputs[i].name, actual[i].detach().cpu());
  }
  for (const TensorOutput& output : outputs) {
    report.outputs.push_back(compare_output(output, outputs, wanted, given));
  }
  return report;
}

bool CaseReport::ok() const {
  for (const OutputReport& output : outputs) {
    if (output.mismatched != 0) return false;
  }
  return problem.empty();
}

}  // namespace exportkit
