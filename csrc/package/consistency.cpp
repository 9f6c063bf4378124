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
                           kAttestationsDir = "exportkit/attestations/", kCasesDir = "exportkit/cases/",
                           kExtraDir = "extra/";

// --- names ---------------------------------------------------------------------------------------------------------

// Whether a text is two parts with a separator between them, and perhaps a dot and an end.
template <class Part, class End>
bool has_parts(std::string_view text, std::string_view separator, const Part& is_part, const End& is_end) {
  const size_t second = text.find(separator);
  if (second == std::string_view::npos || !is_part(text.substr(0, second))) return false;
  text.remove_prefix(second + separator.size());
  const size_t dot = text.find('.');
  return is_part(text.substr(0, dot)) && (dot == std::string_view::npos || is_end(text.substr(dot + 1)));
}

void check_version(const std::string& version, const std::string& what) {
  const auto is_number = [](std::string_view part) { return !part.empty() && std::ranges::all_of(part, is_digit); };
  const auto is_end = [](std::string_view end) {
    return !end.empty() && std::ranges::all_of(end, [](char c) { return is_alnum(c) || c == '.' || c == '+'; });
  };
  require(has_parts(version, ".", is_number, is_end), what, " is ", Quoted{version},
          "; expected a version such as \"2.13\"");
}

// --- records, targets, operators, libraries ------------------------------------------------------------------------

void check_reference(const std::string& what, const std::string& record, const std::string& folder,
                     const Manifest& manifest) {
  require(record_of(manifest, record), what, ": there is no record ", Quoted{record});
  require(record.starts_with(folder), what, ": it is not under ", folder);
}

// Checks that each method is the name of one item of a list, and that there is no other item.
template <class List, class NameOf>
void check_each_method(const List& list, NameOf name_of, const Manifest& manifest, const std::string& what) {
  Names missing;
  for (const Method& method : manifest.methods) missing.insert(method.name);
  for (const auto& item : list) {
    const std::string_view name = name_of(item);
    require(missing.erase(name) == 1, what, " for ", Quoted{name}, ", which is not a method or appears twice");
  }
  if (!missing.empty()) inconsistent(what, " for other methods, but not for ", Quoted{*missing.begin()});
}

constexpr auto kKey = [](const auto& member) -> std::string_view { return member.first; };

void check_records(const Manifest& manifest) {
  const auto out_of_order = std::ranges::adjacent_find(manifest.records, std::ranges::greater_equal(), &Record::name);
  require(out_of_order == manifest.records.end(), "the records are not sorted by name, or a name appears twice");
  for (const Record& record : manifest.records) {
    require(!record.name.starts_with(kExtraDir), "record ", Quoted{record.name}, " is under ", kExtraDir,
            ", where torch's loaders expect their own text; a package must not have records there");
  }
  for (const Library& library : manifest.libraries) {
    check_reference("library " + shown(library.record), library.record,
                    std::string(kOperatorsDir) + library.platform + "/", manifest);
    for (const std::string& statement : library.attestations) {
      check_reference("an attestation of " + shown(library.record), statement, std::string(kAttestationsDir), manifest);
    }
  }
  for (const Case& recorded : manifest.cases) {
    check_reference("case " + shown(recorded.record), recorded.record, std::string(kCasesDir), manifest);
  }
  if (!manifest.program) return;
  for (const auto& [method, record] : manifest.program->records) {
    check_reference("the program of " + shown(method), record, "", manifest);
  }
  check_each_method(manifest.program->records, kKey, manifest, "the program has records");
  check_version(manifest.program->built_with_torch, "the program's built_with_torch");
}

void check_target(const Target& target, const Manifest& manifest) {
  const std::string what = "target " + target.name;
  check_version(target.needs_torch, what + ": needs_torch");
  check_version(target.built_with_torch, what + ": built_with_torch");
  if (target.built_with_cuda) check_version(*target.built_with_cuda, what + ": built_with_cuda");
  const bool cuda = target.device == "cuda";
  require(cuda == target.cuda_architecture.has_value(), what, " for ", target.device, " has cuda_architecture ",
          (target.cuda_architecture ? shown(*target.cuda_architecture) : "null"));
  require(cuda || !target.cuda_ptx, what, " for ", target.device, " has cuda_ptx");
  check_each_method(target.constants, kKey, manifest, what + " has constants");
}

// The code folders of all targets, sorted. The number of them is bounded: each has a key in its target's constants.
std::vector<std::string> code_folders(const Manifest& manifest) {
  std::vector<std::string> folders;
  for (const Target& target : manifest.targets) {
    for (const Method& method : manifest.methods) folders.push_back(code_folder(target.name, method.name));
  }
  std::ranges::sort(folders);
  // A prefix comes right before what it is a prefix of.
  const auto prefix = std::ranges::adjacent_find(
      folders, [](const std::string& shorter, const std::string& longer) { return longer.starts_with(shorter); });
  if (prefix == folders.end()) return folders;
  inconsistent("the code folder ", *prefix, " is a prefix of the code folder ", *std::next(prefix),
               ": torch would read the records of both as one model");
}

void check_targets(const Manifest& manifest) {
  require(!manifest.targets.empty() || manifest.program || !manifest.onnx.empty(),
          "the package has no target, no program and no ONNX model, so there is nothing to run");
  distinct(manifest.targets, kName, "target");
  for (const Target& target : manifest.targets) check_target(target, manifest);
  const std::vector<std::string> folders = code_folders(manifest);
  Names missing(folders.begin(), folders.end());
  const Names known = missing;
  for (const Record& record : manifest.records) {
    if (!record.name.starts_with(kAotInductorDir)) continue;
    const std::string_view rest = std::string_view(record.name).substr(kAotInductorDir.size());
    const size_t slash = rest.find('/');
    const std::string_view folder = rest.substr(0, slash);
    require(known.contains(folder), "record ", Quoted{record.name}, " belongs to no method of a target");
    if (slash != std::string_view::npos && rest.ends_with(".so")) missing.erase(folder);
  }
  for (const std::string& folder : folders) {
    require(!missing.contains(folder), "there is no compiled code in ", folder, ": no record ", kAotInductorDir, folder,
            "/*.so");
  }
}

void check_onnx(const Manifest& manifest) {
  if (manifest.onnx.empty()) return;
  require(manifest.targets.empty() && !manifest.program && manifest.weights.empty() && manifest.libraries.empty(),
          "the package describes an ONNX model, but has targets, a program, weights or libraries too");
  const auto name_of = [](const Onnx& onnx) -> std::string_view { return onnx.method; };
  check_each_method(manifest.onnx, name_of, manifest, "there are ONNX models");
  const Names known = distinct(manifest.operators, kName, "operator");
  for (const Onnx& onnx : manifest.onnx) {
    std::set<std::tuple<std::string_view, std::string_view, std::string_view>> seen;
    for (const OnnxFunction& function : onnx.functions) {
      const std::string what =
          "ONNX function " + shown(function.domain + "::" + function.name + ":" + function.overload);
      require(!function.domain.empty() && !function.name.empty(), what, " has no domain or no name");
      require(known.contains(function.op), what, " computes ", Quoted{function.op},
              ", which is not among the operators");
      const bool is_new = seen.emplace(function.domain, function.name, function.overload).second;
      require(is_new, what, " appears twice");
    }
  }
}

void check_operators(const std::vector<Operator>& operators, const std::string& where) {
  distinct(operators, kName, "operator in ", where, ":");
  for (const Operator& op : operators) {
    require(has_parts(op.name, "::", is_word, is_word), where, ": ", Quoted{op.name},
            " is not an operator name (namespace::name.overload)");
    require(op.schema.starts_with(op.name + "("), where, ": ", op.name,
            " has another operator's schema: ", Quoted{op.schema});
  }
}

void check_libraries(const Manifest& manifest) {
  distinct(manifest.libraries, kRecord, "library");
  std::unordered_map<std::string_view, std::string_view> wanted;
  for (const Operator& op : manifest.operators) wanted.emplace(op.name, op.schema);
  using PlatformAndName = std::pair<std::string_view, std::string_view>;
  std::map<PlatformAndName, std::string_view> definers;
  for (const Library& library : manifest.libraries) {
    const std::string what = "library " + shown(library.record);
    require(library.sha256 == record_of(manifest, library.record)->sha256, what,
            " and its record have different sha256 digests");
    check_operators(library.defines, shown(library.record));
    check_version(library.needs_torch, what + ": needs_torch");
    if (library.torch_bound) check_version(*library.torch_bound, what + ": torch_bound");
    for (const Operator& op : library.defines) {
      const auto other = definers.emplace(PlatformAndName{library.platform, op.name}, library.record).first;
      require(other->second == library.record, Quoted{other->second}, " and ", Quoted{library.record}, " both define ",
              op.name);
      const auto traced = wanted.find(op.name);
      if (traced == wanted.end()) continue;
      require(traced->second == op.schema, what, " defines ", Quoted{op.schema}, ", but the graph was traced with ",
              Quoted{traced->second});
    }
  }
}

}  // namespace

void check_consistency(const Manifest& manifest) {
  check_methods(manifest);
  check_records(manifest);
  check_targets(manifest);
  check_state(manifest, check_weights(manifest));
  check_operators(manifest.operators, "operators");
  check_onnx(manifest);
  check_libraries(manifest);
  check_cases(manifest);
}

const Record* record_of(const Manifest& manifest, std::string_view name) {
  const auto found = std::ranges::lower_bound(manifest.records, name, {}, &Record::name);
  return found != manifest.records.end() && found->name == name ? &*found : nullptr;
}

std::vector<const Library*> libraries_for(const std::vector<Library>& libraries, const Target& target) {
  std::vector<const Library*> usable;
  for (const Library& library : libraries) {
    const bool fits = library.device == "cpu" || library.device == target.device;
    if (library.platform == target.platform && fits) usable.push_back(&library);
  }
  std::ranges::stable_partition(usable, [](const Library* library) { return library->device == "cpu"; });
  return usable;
}

}  // namespace exportkit
