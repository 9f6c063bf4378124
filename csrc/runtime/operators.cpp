#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <vector>

#include "package/consistency.h"
#include "package/container.h"
#include "package/digests.h"
#include "package/errors.h"
#include "package/targets.h"
#include "package/text.h"
#include "runtime/impl.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;
using namespace std::string_view_literals;
using Schemas = std::map<std::string, std::string>;  // by operator, with overload

constexpr const char* kConflictHint =
    "One process holds one build: bring the same file with both, or run one package in a process of its own, with "
    "exportkit.load(..., isolate=True).";
constexpr size_t kShownSchemas = 40;

// A library that defines operators imports one of these symbols: of the stable ABI, of TORCH_LIBRARY, or of its
// predecessor. A library that only adds kernels to another library's operators imports none.
constexpr std::string_view kDefiningSymbols[] = {"\0aoti_torch_library_init_def\0"sv,
                                                 "\0aoti_torch_library_init_fragment\0"sv,
                                                 "\0_ZNR5torch7Library4_defE"sv, "\0_ZN3c1017RegisterOperators"sv};

// An operator library loaded in this process.
struct LoadedLibrary {
  fs::path path;                     // the file it was loaded from
  std::set<std::string> namespaces;  // the namespaces it defined; empty if it only adds kernels
};

std::mutex loading;
std::map<std::string, LoadedLibrary> loaded;  // by sha256

std::string file_name(const std::string& record) { return record.substr(record.rfind('/') + 1); }

std::string namespace_of(const std::string& name) { return name.substr(0, name.find("::")); }

std::set<std::string> namespaces_of(const Library& library) {
  std::set<std::string> names;
  for (const Operator& op : library.defines) names.insert(namespace_of(op.name));
  return names;
}

// A file's content; empty if it cannot be read.
std::string content_of(const fs::path& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  if (!file || fstat(file.get(), &status) != 0) return {};
  return read_at(file.get(), 0, static_cast<uint64_t>(status.st_size));
}

bool has_defining_symbol(std::string_view content) {
  return std::any_of(std::begin(kDefiningSymbols), std::end(kDefiningSymbols),
                     [&](std::string_view symbol) { return content.find(symbol) != std::string_view::npos; });
}

// --- what is in the process ------------------------------------------------------------------------------------------

c10::OperatorName operator_name(const std::string& name) {
  const size_t dot = name.find('.', name.find("::"));
  return {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}

// Every operator known to the dispatcher; some may have kernels but no schema yet.
std::set<std::string> registered_names() {
  std::set<std::string> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) names.insert(c10::toString(name));
  return names;
}

// The text by which schemas are compared: exportkit/schema_text.py says why none is parsed.
std::string schema_text(const c10::FunctionSchema& schema) {
  constexpr std::string_view kBegin = "($", kEnd = "! -> )";
  std::string text = c10::toString(schema);
  for (size_t at = 0; (at = text.find(kBegin, at)) != std::string::npos; ++at) {
    const size_t end = text.find_first_not_of("0123456789", at + kBegin.size());
    if (end != std::string::npos && text.compare(end, kEnd.size(), kEnd) == 0) {
      text.replace(at, end + kEnd.size() - at, "!");
    }
  }
  return text;
}

Schemas registered_in(const std::string& name_space) {
  Schemas schemas;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with(name_space + "::")) continue;
    if (const auto found = c10::Dispatcher::singleton().findSchema(name)) {
      schemas.emplace(c10::toString(name), schema_text(found->schema()));
    }
  }
  return schemas;
}

// The existing files whose code is mapped into the process.
std::map<fs::path, struct stat> mapped_files() {
  std::ifstream maps("/proc/self/maps");
  std::map<fs::path, struct stat> files;
  for (std::string line; std::getline(maps, line);) {
    // Addresses, permissions, offset, device, inode, path.
    std::istringstream fields(line);
    std::string addresses, permissions, offset, device, path;
    uint64_t inode = 0;
    fields >> addresses >> permissions >> offset >> device >> inode >> std::ws;
    std::getline(fields, path);
    if (permissions.size() < 3 || permissions[2] != 'x' || !path.starts_with('/')) continue;
    // After an upgrade the path may name another file than the mapped one.
    struct stat status{};
    if (stat(path.c_str(), &status) == 0 && status.st_ino == inode) files.emplace(path, status);
  }
  return files;
}

// A file with this content that something else (a plain dlopen, an import) already mapped into the process.
std::optional<fs::path> mapped_copy(const std::string& sha256, int64_t size) {
  for (const auto& [path, status] : mapped_files()) {
    if (status.st_size == size && sha256_hex(content_of(path)) == sha256) return path;
  }
  return std::nullopt;
}

template <typename Function>
fs::path file_of(Function* function) {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(function), &info) == 0) return {};
  return info.dli_fname;
}

// What the dispatcher knows of where a namespace was registered, such as "registered at ops.cpp:12".
std::string registration_of(const std::string& name_space) {
  const Schemas there = registered_in(name_space);
  if (there.empty()) return "registered meanwhile";
  const auto found = c10::Dispatcher::singleton().findSchema(operator_name(there.begin()->first));
  return found ? found->debug() : "registered meanwhile";
}

// Which library registered a namespace, as far as known.
std::string owner_of(const std::string& name_space) {
  std::set<fs::path> known = {file_of(&load_operators)};
  for (const auto& [sha256, library] : loaded) {
    if (library.namespaces.contains(name_space)) return "sha256 " + sha256 + " from " + library.path.string();
    known.insert(library.path);
  }
  const std::string at = registration_of(name_space);
  std::vector<std::string> found;
  const std::string torch = file_of(&aoti_torch_abi_version).parent_path().parent_path().string() + "/";
  for (const auto& [path, status] : mapped_files()) {
    if (at.find(".py:") != std::string::npos || path.string().starts_with(torch) || known.contains(path)) continue;
    const std::string content = content_of(path);
    if (has_defining_symbol(content)) found.push_back("sha256 " + sha256_hex(content) + " from " + path.string());
  }
  return (found.empty() ? "code" : joined(found, " or ")) + " (" + at + "), which exportkit did not load";
}

// --- refusals --------------------------------------------------------------------------------------------------------

// The differences between two builds' operators, one per line.
std::string differences(const Schemas& there, const Schemas& here) {
  std::vector<std::string> changed, there_only, here_only, same;
  for (const auto& [name, schema] : there) {
    const auto other = here.find(name);
    if (other == here.end()) {
      there_only.push_back("registered only: " + schema);
    } else if (schema == other->second) {
      same.push_back("the same in both: " + schema);
    } else {
      changed.push_back("registered as " + schema + ", in this file " + other->second);
    }
  }
  for (const auto& [name, schema] : here) {
    if (!there.contains(name)) here_only.push_back("in this file only: " + schema);
  }
  std::vector<std::string> lines;
  for (const auto& part : {changed, there_only, here_only, same}) lines.insert(lines.end(), part.begin(), part.end());
  if (lines.size() > kShownSchemas) {
    lines[kShownSchemas] = "and " + std::to_string(lines.size() - kShownSchemas) + " operators more";
    lines.resize(kShownSchemas + 1);
  }
  return lines.empty() ? "" : "\n    " + joined(lines, "\n    ");
}

// exportkit's own operators, csrc/recurrent: what they compute never changes. Of several builds, the one that came
// first serves all packages. Whether it has the operators of this library.
bool is_served(const Library& library) {
  const std::string own = "exportkit_recurrent";
  if (namespaces_of(library) != std::set<std::string>{own}) return false;
  const Schemas there = registered_in(own);
  return std::all_of(library.defines.begin(), library.defines.end(), [&](const Operator& op) {
    const auto found = there.find(op.name);
    return found != there.end() && found->second == op.schema;
  });
}

// Refuses another build of a registered namespace, for which dlopen would end the process. Libraries of the package
// that were loaded before may have defined other operators of the namespaces in `shared`.
void refuse_second_definition(const std::string& file, const Library& library, const std::set<std::string>& defines,
                              const std::set<std::string>& shared) {
  for (const std::string& name_space : defines) {
    const Schemas there = registered_in(name_space);
    if (there.empty()) continue;
    Schemas here;
    for (const Operator& op : library.defines) {
      if (namespace_of(op.name) == name_space) here.emplace(op.name, op.schema);
    }
    const auto is_there = [&](const auto& one) { return there.contains(one.first); };
    if (shared.contains(name_space) && std::none_of(here.begin(), here.end(), is_there)) continue;
    throw Error(errors::kLibraryConflict,
                "operator namespace `" + name_space + "` is already registered, by " + owner_of(name_space) + "; " +
                    file + " (sha256 " + library.sha256 + ") defines it too" + differences(there, here),
                kConflictHint);
  }
}

// Refuses another build of a library that adds kernels: they would replace those of the first for all its users.
void refuse_other_kernels(const std::string& file, const std::string& sha256) {
  for (const auto& [other, library] : loaded) {
    if (library.path.filename() == file && library.namespaces.empty()) {
      throw Error(errors::kLibraryConflict,
                  "another build of " + file + " is loaded in this process: sha256 " + other + " from " +
                      library.path.string() + "; this one is sha256 " + sha256,
                  kConflictHint);
    }
  }
}

const char* linker_hint(const std::string& complaint) {
  if (complaint.find("failed to map segment") != std::string::npos) {
    return "Its directory is mounted noexec: set EXPORTKIT_CACHE to a directory that may hold code.";
  }
  if (complaint.find("undefined symbol") != std::string::npos) {
    return "An undefined torch symbol means a library built for another torch; rebuild it for this one.";
  }
  return "`ldd` says which of the libraries it needs are missing here.";
}

// Opens a library; returns what the dynamic linker says against it. A library that is a Python module too calls Python
// in functions that only Python calls. In a program without Python, functions are then looked up when they are called,
// and no_python/ has what must be there before: it stays for the libraries that come after.
std::string opened(const fs::path& path) {
  const auto complaint_of = [&](int binding) -> std::string {
    if (dlopen(path.c_str(), binding | RTLD_LOCAL) != nullptr) return {};
    const char* const said = dlerror();
    return said == nullptr ? "no reason given" : said;
  };
  const std::string complaint = complaint_of(RTLD_NOW);
  const bool is_module = complaint.find("undefined symbol: Py") != std::string::npos ||
                         complaint.find("undefined symbol: _Py") != std::string::npos ||
                         complaint.find("libtorch_python.so") != std::string::npos;
  if (!is_module || dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr) return complaint;
  dlopen((file_of(&load_operators).parent_path() / "libexportkit_no_python.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
  return complaint_of(RTLD_LAZY);
}

// --- loading ---------------------------------------------------------------------------------------------------------

void load(const PackageReader& reader, const Library& library, const std::set<std::string>& shared,
          const Unpacking& how) {
  std::set<std::string> defines = namespaces_of(library);
  const std::lock_guard lock(loading);
  if (loaded.contains(library.sha256)) return;
  if (const auto mapped = mapped_copy(library.sha256, reader.record(library.record).size)) {
    loaded[library.sha256] = {*mapped, defines};
    return;
  }
  if (is_served(library)) return;
  const CacheEntry entry = unpack(reader, library, how);
  const std::string file = file_name(library.record);
  const fs::path& path = entry.library;
  const bool can_define = !defines.empty() || has_defining_symbol(content_of(path));
  const std::set<std::string> before = can_define ? registered_names() : std::set<std::string>();
  if (!can_define) refuse_other_kernels(file, library.sha256);
  refuse_second_definition(file, library, defines, shared);
  if (const std::string complaint = opened(path); !complaint.empty()) {
    throw Error(errors::kLibraryLoad, "the dynamic linker refused " + file + ": " + complaint, linker_hint(complaint));
  }
  if (can_define && defines.empty()) {
    for (const std::string& name : registered_names()) {
      if (!before.contains(name)) defines.insert(namespace_of(name));
    }
  }
  loaded[library.sha256] = {path, defines};
}

// Defines the operators that a library adds kernels to and that Python defined where the package was made.
void define_missing(const Manifest& manifest, const std::vector<const Library*>& libraries) {
  static std::vector<torch::Library> fragments;  // an operator is defined as long as its fragment lives
  const std::lock_guard lock(loading);
  std::set<std::string> added;
  for (const Library* library : libraries) added.insert(library->adds_to.begin(), library->adds_to.end());
  for (const Operator& op : manifest.operators) {
    if (!added.contains(op.name) || c10::Dispatcher::singleton().findSchema(operator_name(op.name))) continue;
    fragments.emplace_back(torch::Library::FRAGMENT, namespace_of(op.name), std::nullopt, __FILE__, __LINE__);
    try {
      fragments.back().def(op.schema.c_str());
    } catch (const c10::Error&) {
      throw Error(errors::kSchemaChanged,
                  "the operator " + op.name + " cannot be defined here: torch cannot read '" + op.schema + "'",
                  "Import what defines it in Python before the package is loaded.");
    }
  }
}

// Checks that every operator of the graph is registered with the schema that the manifest records.
void check_operators(const Manifest& manifest, const std::vector<const Library*>& libraries) {
  for (const Operator& op : manifest.operators) {
    const auto registered = c10::Dispatcher::singleton().findSchema(operator_name(op.name));
    if (!registered) {
      std::vector<std::string> names;
      for (const Library* library : libraries) names.push_back(file_name(library->record));
      throw Error(errors::kMissingLibrary,
                  "operator " + op.name + " is not loaded, and no library of the package gives it (libraries: " +
                      (names.empty() ? "none" : joined(names)) + ")",
                  "`exportkit package` adds the library; `--op-library` names one that is not exportkit's own.");
    }
    if (const std::string there = schema_text(registered->schema()); there != op.schema) {
      throw Error(errors::kSchemaChanged,
                  "operator " + op.name + " is registered as " + there + "; the package was made with " + op.schema,
                  "Export again with the library that is loaded, or load the one that the package was made with.");
    }
  }
}

}  // namespace

void load_operators(const PackageReader& reader, const Target& target, const Unpacking& how) {
  const std::vector<const Library*> libraries = libraries_for(reader.manifest().libraries, target);
  for (const Library* library : libraries) {
    if (const auto reason = library_rejection(*library, torch_version())) {
      throw Error(errors::kTorchVersion,
                  "the operator library " + file_name(library->record) + " does not work here: " + *reason,
                  "Install a torch that it works with, or build it for the stable ABI (torch/csrc/stable).");
    }
  }
  std::set<std::string> shared;
  for (const Library* library : libraries) {
    load(reader, *library, shared, how);
    shared.merge(namespaces_of(*library));
  }
  define_missing(reader.manifest(), libraries);
  check_operators(reader.manifest(), libraries);
}

}  // namespace exportkit
