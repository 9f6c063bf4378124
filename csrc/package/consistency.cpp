#include "package/consistency.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "package/manifest_checks.h"

namespace exportkit {

namespace {

constexpr std::string_view kAotInductorDir = "data/aotinductor/", kOperatorsDir = "exportkit/ops/",
                           kCasesDir = "exportkit/cases/", kExtraDir = "extra/";

// --- names ---------------------------------------------------------------------------------------------------------

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Removes the leading characters that satisfy `allowed`; false if there are none.
template <class F>
bool take_while(std::string_view& text, const F& allowed) {
  const size_t count = std::find_if_not(text.begin(), text.end(), allowed) - text.begin();
  text.remove_prefix(count);
  return count > 0;
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  const bool there = text.starts_with(prefix);
  text.remove_prefix(there ? prefix.size() : 0);
  return there;
}

// 2.13, 2.13.0+cpu
bool is_version(std::string_view text) {
  const auto tail = [](char c) { return is_digit(c) || is_letter(c) || c == '.' || c == '+'; };
  if (!take_while(text, is_digit) || !take_prefix(text, ".") || !take_while(text, is_digit)) return false;
  return text.empty() || (take_prefix(text, ".") && take_while(text, tail) && text.empty());
}

void check_version(const std::string& version, const std::string& what) {
  require(is_version(version),
          [&] { return what + " is " + shown(version) + "; expected a version such as \"2.13\""; });
}

// namespace::name, namespace::name.overload
bool is_operator_name(std::string_view text) {
  const auto word = [&text] {
    if (!text.empty() && is_digit(text[0])) return false;
    return take_while(text, [](char c) { return is_digit(c) || is_letter(c) || c == '_'; });
  };
  if (!word() || !take_prefix(text, "::") || !word()) return false;
  return text.empty() || (take_prefix(text, ".") && word() && text.empty());
}

// --- records, targets, operators, libraries, cases -----------------------------------------------------------------

using Digests = std::unordered_map<std::string_view, std::string_view>;

void check_reference(const std::string& what, const std::string& record, const std::string& folder,
                     const Digests& records) {
  require(records.contains(record), [&] { return what + ": there is no record " + shown(record); });
  require(record.starts_with(folder), [&] { return what + ": it is not under " + folder; });
}

void check_records(const Manifest& manifest, const Digests& records) {
  const auto out_of_order = [](const Record& one, const Record& next) { return one.name >= next.name; };
  require(std::adjacent_find(manifest.records.begin(), manifest.records.end(), out_of_order) == manifest.records.end(),
          [] { return "the records are not sorted by name, or a name appears twice"; });
  for (const Record& record : manifest.records) {
    require(!record.name.starts_with(kExtraDir), [&] {
      return "record " + shown(record.name) + " is under " + std::string(kExtraDir) +
             ", where torch's loaders expect their own text; a package must not have records there";
    });
  }
  for (const Library& library : manifest.libraries) {
    check_reference("library " + shown(library.record), library.record,
                    std::string(kOperatorsDir) + library.platform + "/", records);
  }
  for (const Case& recorded : manifest.cases) {
    check_reference("case " + shown(recorded.record), recorded.record, std::string(kCasesDir), records);
  }
  if (manifest.program) {
    check_reference("the program", manifest.program->record, "", records);
    check_version(manifest.program->built_with_torch, "the program's built_with_torch");
  }
}

void check_target(const Target& target) {
  const std::string what = "target " + target.name;
  check_version(target.needs_torch, what + ": needs_torch");
  check_version(target.built_with_torch, what + ": built_with_torch");
  if (target.built_with_cuda) check_version(*target.built_with_cuda, what + ": built_with_cuda");
  const bool cuda = target.device == "cuda";
  require(cuda == target.cuda_architecture.has_value(), [&] {
    return what + " for " + target.device + " has cuda_architecture " +
           (target.cuda_architecture ? shown(*target.cuda_architecture) : "null");
  });
  require(cuda || !target.cuda_ptx, [&] { return what + " for " + target.device + " has cuda_ptx"; });
}

void check_targets(const Manifest& manifest) {
  require(!manifest.targets.empty() || manifest.program || manifest.onnx,
          [] { return "the package has no target, no program and no ONNX model, so there is nothing to run"; });
  distinct(manifest.targets, kName, "target");
  std::set<std::string_view> names;  // sorted: a prefix comes right before what it is a prefix of
  for (const Target& target : manifest.targets) names.insert(target.name);
  const auto prefix = std::adjacent_find(names.begin(), names.end(),
                                         [](auto shorter, auto longer) { return longer.starts_with(shorter); });
  require(prefix == names.end(), [&] {
    return "target " + std::string(*prefix) + " is a prefix of target " + std::string(*std::next(prefix)) +
           ": torch would read the records of both as one model";
  });
  Names with_code;
  for (const Record& record : manifest.records) {
    std::string_view rest = record.name;
    if (!take_prefix(rest, kAotInductorDir)) continue;
    const size_t slash = rest.find('/');
    const std::string_view folder = rest.substr(0, slash);
    require(names.contains(folder), [&] { return "record " + shown(record.name) + " belongs to no target"; });
    if (slash != std::string_view::npos && rest.ends_with(".so")) with_code.insert(folder);
  }
  for (const Target& target : manifest.targets) {
    require(with_code.contains(target.name), [&] {
      return "target " + target.name + " has no compiled code: no record " + std::string(kAotInductorDir) +
             target.name + "/*.so";
    });
    check_target(target);
  }
}

void check_onnx(const Manifest& manifest) {
  if (!manifest.onnx) return;
  require(manifest.targets.empty() && !manifest.program && manifest.weights.empty() && manifest.libraries.empty(),
          [] { return "the package describes an ONNX model, but has targets, a program, weights or libraries too"; });
  const Names known = distinct(manifest.operators, kName, "operator");
  std::set<std::tuple<std::string_view, std::string_view, std::string_view>> seen;
  for (const OnnxFunction& function : manifest.onnx->functions) {
    const auto what = [&] {
      return "ONNX function " + shown(function.domain + "::" + function.name + ":" + function.overload);
    };
    require(!function.domain.empty() && !function.name.empty(), [&] { return what() + " has no domain or no name"; });
    require(known.contains(function.op),
            [&] { return what() + " computes " + shown(function.op) + ", which is not among the operators"; });
    require(seen.emplace(function.domain, function.name, function.overload).second,
            [&] { return what() + " appears twice"; });
  }
}

void check_operators(const std::vector<Operator>& operators, const std::string& where) {
  distinct(operators, kName, ("operator in " + where + ":").c_str());
  for (const Operator& op : operators) {
    require(is_operator_name(op.name),
            [&] { return where + ": " + shown(op.name) + " is not an operator name (namespace::name.overload)"; });
    require(op.schema.starts_with(op.name + "("),
            [&] { return where + ": " + op.name + " has another operator's schema: " + shown(op.schema); });
  }
}

void check_libraries(const Manifest& manifest, const Digests& records) {
  distinct(manifest.libraries, kRecord, "library");
  std::unordered_map<std::string_view, std::string_view> wanted;
  for (const Operator& op : manifest.operators) wanted.emplace(op.name, op.schema);
  using PlatformAndName = std::pair<std::string_view, std::string_view>;
  std::map<PlatformAndName, std::string_view> definers;
  for (const Library& library : manifest.libraries) {
    const std::string what = "library " + shown(library.record);
    require(library.sha256 == records.at(library.record),
            [&] { return what + " and its record have different sha256 digests"; });
    check_operators(library.defines, shown(library.record));
    check_version(library.needs_torch, what + ": needs_torch");
    if (library.torch_bound) check_version(*library.torch_bound, what + ": torch_bound");
    for (const Operator& op : library.defines) {
      const auto other = definers.emplace(PlatformAndName{library.platform, op.name}, library.record).first;
      require(other->second == library.record,
              [&] { return shown(other->second) + " and " + shown(library.record) + " both define " + op.name; });
      const auto traced = wanted.find(op.name);
      require(traced == wanted.end() || traced->second == op.schema, [&] {
        return what + " defines " + shown(op.schema) + ", but the graph was traced with " + shown(traced->second);
      });
    }
  }
}

// Checks the outputs of a case that have references.
void check_accuracy(const Case& recorded, const Call& call) {
  const std::string what = "case " + shown(recorded.record);
  require(recorded.accuracy.empty() != recorded.reference_dtype.has_value(),
          [&] { return what + " must have a reference_dtype if it has references, and only then"; });
  std::map<std::string_view, const std::optional<Accuracy>*> given;
  for (const auto& [name, accuracy] : recorded.accuracy) given.emplace(name, &accuracy);
  size_t known = 0;
  for (const TensorOutput& output : call.outputs) {
    const auto found = given.find(output.name);
    if (found == given.end()) continue;
    const bool floating = output.dtype.starts_with("float") || output.dtype == "bfloat16";
    require(found->second->has_value() == floating, [&] {
      return what + ": the accuracy of " + shown(output.name) + ", which is " + output.dtype + ", must " +
             (floating ? "not be null" : "be null");
    });
    const auto& rows_of = output.tolerance.rows_of;
    require(!floating || !rows_of || given.contains(*rows_of),
            [&] { return what + ": " + shown(output.name) + " has a reference, but its indices have none"; });
    ++known;
  }
  require(known == given.size(), [&] { return what + " has a reference of something that is not an output"; });
}

void check_cases(const Manifest& manifest) {
  distinct(manifest.cases, kRecord, "case");
  const Dimensions dimensions = dimensions_of(manifest.call);
  for (const Case& recorded : manifest.cases) {
    // Names are unique, so the same number of declared names means the same names.
    require(recorded.sizes.size() == dimensions.size(), [&] {
      return "case " + shown(recorded.record) + " gives sizes for " + std::to_string(recorded.sizes.size()) +
             " dimensions of " + std::to_string(dimensions.size());
    });
    for (const auto& given : recorded.sizes) {
      const std::string& name = given.first;
      const int64_t size = given.second;
      const auto found = dimensions.find(name);
      require(found != dimensions.end(), [&] {
        return "case " + shown(recorded.record) + " has a size for " + name + ", which is not a dimension";
      });
      require(found->second->min <= size && size <= found->second->max, [&] {
        return "case " + shown(recorded.record) + " has " + name + " = " + std::to_string(size) + ", outside " +
               std::to_string(found->second->min) + " to " + std::to_string(found->second->max);
      });
    }
    check_accuracy(recorded, manifest.call);
  }
}

}  // namespace

void check_consistency(const Manifest& manifest) {
  Digests records;
  for (const Record& record : manifest.records) records.emplace(record.name, record.sha256);
  check_call(manifest.call);
  check_records(manifest, records);
  check_targets(manifest);
  check_weights(manifest);
  check_operators(manifest.operators, "operators");
  check_onnx(manifest);
  check_libraries(manifest, records);
  check_cases(manifest);
}

std::vector<const Library*> libraries_for(const std::vector<Library>& libraries, const Target& target) {
  std::vector<const Library*> usable;
  for (const Library& library : libraries) {
    const bool fits = library.device == "cpu" || library.device == target.device;
    if (library.platform == target.platform && fits) usable.push_back(&library);
  }
  std::stable_partition(usable.begin(), usable.end(), [](const Library* library) { return library->device == "cpu"; });
  return usable;
}

}  // namespace exportkit
