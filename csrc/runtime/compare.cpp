#include "runtime/compare.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <set>
#include <span>

#include "package/accuracy.h"
#include "package/consistency.h"
#include "package/safetensors.h"
#include "package/text.h"
#include "runtime/inputs.h"
#include "runtime/tensors.h"

namespace exportkit {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
  const double rtol = output.tolerance.rtol, atol = output.tolerance.atol;
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

// What a call, or a session's state, is compared with: eager's answers, and the references of those that have one.
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

// Moves the dimension of ranked values, or of their indices, to the end. Indices of argmax do not have it, and get it.
at::Tensor with_last(const at::Tensor& tensor, int64_t dim, int64_t rank) {
  return (tensor.dim() == rank ? tensor : tensor.unsqueeze(dim)).movedim(dim, -1);
}

// Compares indices [..., K, ...] that rank values [..., N, ...]. The k-th greatest value moves by no more than the
// values themselves do. So the value that `actual` picked at place k must be within the values' tolerance of the value
// that `expected` picked there. The indices may differ: values closer than the tolerance may change places.
OutputReport compare_ranking(const TensorOutput& output, const OutputTolerance& tolerance, const Tensors& expected,
                             const Tensors& actual) {
  const std::string& of = *output.tolerance.ranking_of;
  const int64_t dim = output.tolerance.dim.value_or(-1), rank = expected.at(of).dim();
  const at::Tensor wanted = with_last(expected.at(output.name), dim, rank),
                   given = with_last(actual.at(output.name), dim, rank),
                   wanted_values = with_last(expected.at(of), dim, rank),
                   given_values = with_last(actual.at(of), dim, rank);
  const int64_t values = wanted_values.size(-1);
  const auto picked = [&](const at::Tensor& from, const at::Tensor& index) {
    return values > 0 ? from.gather(-1, index.clamp(0, values - 1)) : index.to(at::kDouble);
  };
  const auto [distance, magnitude] = difference(picked(wanted_values, wanted), picked(given_values, given));
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

OutputReport compare_output(const TensorOutput& output, const std::vector<TensorOutput>& all, const Expected& expected,
                            const Tensors& actual) {
  const bool has_reference = expected.references.contains(output.name);
  if (output.tolerance.ranking_of) {
    const TensorOutput& ranked = *std::ranges::find(all, *output.tolerance.ranking_of, &TensorOutput::name);
    if (!has_reference || !expected.accuracy.contains(ranked.name)) {
      return compare_ranking(output, ranked.tolerance, expected.eager, actual);
    }
    // The places of a ranking are as uncertain as the values that it ranks.
    const double allowed = allowed_error(expected.accuracy.at(ranked.name), ranked.dtype).greatest;
    const double typical = typical_of(expected.references.at(ranked.name));
    return compare_ranking(output, {allowed, allowed * typical, {}, {}, {}, {}}, expected.references, actual);
  }
  if (has_reference && expected.accuracy.contains(output.name)) return compare_with_reference(output, expected, actual);
  if (output.tolerance.rows_of) return compare_rows(output, expected.eager, actual);
  const at::Tensor& wanted = expected.eager.at(output.name);
  return compare_values(output, wanted, actual.at(output.name), at::ones_like(wanted, at::kBool));
}

std::vector<OutputReport> compare_all(const std::vector<TensorOutput>& results, const Expected& expected,
                                      const Tensors& actual) {
  std::vector<OutputReport> reports;
  for (const TensorOutput& result : results) reports.push_back(compare_output(result, results, expected, actual));
  return reports;
}

std::string shown(const std::optional<double>& value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value.value_or(0));
  return value ? text : "-";
}

// Keeps the greatest error of all calls, because one call of few elements may happen to be exact.
void keep_greatest(std::map<std::string, Accuracy>& known, const Accuracies& recorded) {
  for (const auto& [name, accuracy] : recorded) {
    if (!accuracy) continue;
    Accuracy& greatest = known[name];
    greatest = {std::max(greatest.rms, accuracy->rms), std::max(greatest.greatest, accuracy->greatest)};
  }
}

// Adds a result beside its expected value, on the CPU. Says what is wrong if they cannot be compared, else nothing.
std::string add(const std::string& name, const at::Tensor& expected, const at::Tensor& actual, Tensors& eager,
                Tensors& given) {
  if (actual.scalar_type() != expected.scalar_type() || !actual.sizes().equals(expected.sizes())) {
    return "`" + name + "` is " + describe(actual) + "; expected " + describe(expected);
  }
  eager.emplace(name, expected.detach().cpu());
  given.emplace(name, actual.detach().cpu());
  return {};
}

// What the metadata of a case's file say of its inputs. A stranger's file may say anything.
std::string edge_case_in(const std::string& content) {
  constexpr size_t kLongest = 1000;
  const safetensors::Metadata metadata = safetensors::parse_metadata(content);
  const auto said = metadata.find("edge_case");
  return said == metadata.end() || said->second.size() > kLongest ? "" : said->second;
}

// What a call gives: its outputs, then what it writes, as `written.<input>`. And a session's state as results.
std::vector<TensorOutput> results_of(const Call& call) {
  std::vector<TensorOutput> results = call.outputs;
  for (const TensorInput& input : call.inputs) {
    if (input.written) results.push_back({written_name(input), input.dtype, {}, *input.written});
  }
  return results;
}

std::vector<TensorOutput> results_of(const std::vector<StateTensor>& state) {
  std::vector<TensorOutput> results;
  for (const StateTensor& tensor : state) results.push_back({tensor.name, tensor.dtype, {}, tensor.tolerance});
  return results;
}

// The references of a call's or a state's results: `key` gives a result's place in the record.
template <class Key>
Tensors references_of(const Tensors& tensors, const Accuracies& accuracies, const std::vector<TensorOutput>& results,
                      const Key& key) {
  std::set<std::string_view> has_reference;
  for (const auto& [name, accuracy] : accuracies) has_reference.insert(name);
  Tensors references;
  for (size_t i = 0; i < results.size(); ++i) {
    if (has_reference.contains(results[i].name)) references.emplace(results[i].name, tensors.at(key(i)));
  }
  return references;
}

RecordedCall read_call(const Tensors& tensors, const Call& call, const CaseCall& recorded, size_t number,
                       c10::Device device) {
  RecordedCall read{recorded.method, {recorded.sizes.begin(), recorded.sizes.end()}, {}, {}, {}, {}};
  const auto key = [&](const char* kind, size_t i) { return concat(number, ".", kind, ".", i); };
  std::vector<std::string> references;  // where those of the call's results are, in the order of results_of
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    read.outputs.push_back(tensors.at(key("output", i)).to(device));
    references.push_back(key("reference", i));
  }
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    read.inputs.push_back(tensors.at(key("input", i)).to(device));
    if (!call.inputs[i].written) continue;
    read.written.emplace(call.inputs[i].name, tensors.at(key("written", i)).to(device));
    references.push_back(key("written_reference", i));
  }
  read.references =
      references_of(tensors, recorded.accuracy, results_of(call), [&](size_t i) { return references[i]; });
  return read;
}

}  // namespace

Comparison::Comparison(const Manifest& manifest) : manifest_(manifest) {
  for (const Case& recorded : manifest.cases) {
    for (const CaseCall& call : recorded.calls) keep_greatest(accuracy_[call.method], call.accuracy);
    keep_greatest(state_accuracy_, recorded.state_accuracy);
  }
}

CallReport Comparison::compare(const RecordedCall& recorded, const std::vector<at::Tensor>& outputs) const {
  const Call& call = method_of(manifest_, recorded.method)->call;
  CallReport report{recorded.method, recorded.sizes, {}, {}};
  if (outputs.size() != call.outputs.size()) {
    report.problem = "the call returned " + std::to_string(outputs.size()) + " tensors; the manifest lists " +
                     std::to_string(call.outputs.size());
    return report;
  }
  Tensors eager, given;
  for (size_t i = 0; i < outputs.size() && report.problem.empty(); ++i) {
    report.problem = add(call.outputs[i].name, recorded.outputs[i], outputs[i], eager, given);
  }
  for (size_t i = 0; i < call.inputs.size() && report.problem.empty(); ++i) {
    const auto written = recorded.written.find(call.inputs[i].name);
    if (written == recorded.written.end()) continue;
    report.problem = add(written_name(call.inputs[i]), written->second, recorded.inputs[i], eager, given);
  }
  if (!report.problem.empty()) return report;
  report.outputs = compare_all(results_of(call), {eager, recorded.references, accuracy_.at(recorded.method)}, given);
  return report;
}

std::vector<OutputReport> Comparison::compare_state(
    const RecordedCase& recorded, const std::vector<std::pair<std::string, at::Tensor>>& state) const {
  if (recorded.state.empty()) return {};
  Tensors given, eager;
  for (const auto& [name, tensor] : state) given.emplace(name, tensor.detach().cpu());
  for (const auto& [name, tensor] : recorded.state) eager.emplace(name, tensor.detach().cpu());
  return compare_all(results_of(manifest_.state), {eager, recorded.state_references, state_accuracy_}, given);
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

bool CallReport::ok() const { return problem.empty() && std::ranges::all_of(outputs, &OutputReport::ok); }

bool CaseReport::ok() const {
  return std::ranges::all_of(calls, &CallReport::ok) && std::ranges::all_of(state, &OutputReport::ok);
}

RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device) {
  const Manifest& manifest = reader.manifest();
  const Case& recorded = manifest.cases.at(index);
  const std::string content = reader.read(recorded.record);
  check_case(manifest, recorded, content);  // each tensor that the manifest speaks of is there
  const Tensors tensors = parse_tensors(content);
  RecordedCase read;
  read.edge_case = edge_case_in(content);
  for (const CaseCall& call : recorded.calls) {
    const Call& described = method_of(manifest, call.method)->call;
    read.calls.push_back(read_call(tensors, described, call, read.calls.size(), device));
  }
  if (!tensors.contains("state.0")) return read;
  for (size_t i = 0; i < manifest.state.size(); ++i) {
    read.state.emplace(manifest.state[i].name, tensors.at("state." + std::to_string(i)).to(device));
  }
  read.state_references = references_of(tensors, recorded.state_accuracy, results_of(manifest.state),
                                        [](size_t i) { return "state_reference." + std::to_string(i); });
  return read;
}

}  // namespace exportkit
