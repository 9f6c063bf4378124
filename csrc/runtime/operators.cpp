#include "runtime/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <dlfcn.h>
#include <sys/stat.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>

#include "runtime/cache.h"
#include "runtime/package/consistency.h"
#include "runtime/package/digest.h"
#include "runtime/package/errors.h"
#include "runtime/targets.h"

namespace exportkit {
namespace {

// A library that this process has: by its sha256, the file and the namespaces it defines.
struct Loaded {
  std::filesystem::path path;
  std::set<std::string> namespaces;
};

std::mutex loading;
std::map<std::string, Loaded> loaded;

std::string file_name(const std::string& record) { return record.substr(record.rfind('/') + 1); }

std::set<std::string> namespaces_of(const Library& library) {
  std::set<std::string> names;
  for (const Operator& op : library.defines) names.insert(op.name.substr(0, op.name.find("::")));
  return names;
}

std::optional<std::string> file_sha256(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  Sha256 digest;
  std::string block(size_t{1} << 18, '\0');
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount() > 0) {
    digest.update(block.data(), static_cast<size_t>(file.gcount()));
  }
  return digest.hex();
}

// A file with this content that something else (a plain dlopen, Python's runtime) already mapped into the process.
std::optional<std::string> mapped_copy(const std::string& sha256, int64_t size) {
  std::ifstream maps("/proc/self/maps");
  std::set<std::pair<uint64_t, std::string>> seen;
  for (std::string line; std::getline(maps, line);) {
    // Addresses, permissions, offset, device, inode, path.
    std::istringstream fields(line);
    std::string addresses, permissions, offset, device, path;
    uint64_t inode = 0;
    fields >> addresses >> permissions >> offset >> device >> inode >> std::ws;
    std::getline(fields, path);
    if (permissions.size() < 3 || permissions[2] != 'x' || !path.starts_with('/')) continue;
    if (!seen.emplace(inode, path).second) continue;
    // After an upgrade the path may lead to another file than the one that is mapped.
    struct stat status {};
    if (stat(path.c_str(), &status) == 0 && status.st_ino == inode && status.st_size == size &&
        file_sha256(path) == sha256) {
      return path;
    }
  }
  return std::nullopt;
}

// The registered schemas of a namespace's operators, as far as they have one; some may have kernels only.
std::vector<std::string> registered_in(const std::string& name_space) {
  std::vector<std::string> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.starts_with(name_space + "::") && c10::Dispatcher::singleton().findSchema(name)) {
      names.push_back(c10::toString(name));
    }
  }
  return names;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

void refuse_conflict(const std::string& file, const std::string& sha256, const std::set<std::string>& defines) {
  for (const auto& [other, library] : loaded) {
    if (library.path.filename() == file) {
      throw Error(errors::kLibraryConflict,
                  "another build of " + file + " is loaded in this process: sha256 " + other + " from " +
                      library.path.string() + "; this one is " + sha256,
                  "One process holds one build of a library. Use a second process, or one build for both.");
    }
  }
  for (const std::string& name_space : defines) {
    const std::vector<std::string> registered = registered_in(name_space);
    if (registered.empty()) continue;
    std::string owner = "a build exportkit did not load";
    for (const auto& [other, library] : loaded) {
      if (library.namespaces.contains(name_space)) owner = "sha256 " + other + " from " + library.path.string();
    }
    throw Error(errors::kLibraryConflict,
                "operator namespace `" + name_space + "` is already registered by " + owner + "; " + file +
                    " (sha256 " + sha256 + ") defines it too. Registered: " + joined(registered),
                "One process holds one build of a namespace. Use a second process, or the same file for both.");
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

void load(const PackageReader& reader, const Library& library, const Unpacking& how) {
  const std::lock_guard lock(loading);
  const std::set<std::string> defines = namespaces_of(library);
  if (loaded.contains(library.sha256)) return;
  if (const auto mapped = mapped_copy(library.sha256, reader.record(library.record).size)) {
    loaded.emplace(library.sha256, Loaded{*mapped, defines});
    return;
  }
  const std::string file = file_name(library.record);
  refuse_conflict(file, library.sha256, defines);
  const CacheEntry entry = unpack(reader, library, how);
  const std::filesystem::path path = entry.folder() / file;
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    const char* said = dlerror();
    const std::string complaint = said == nullptr ? "" : said;
    throw Error(errors::kLibraryLoad, "the dynamic linker refused " + file + ": " + complaint, linker_hint(complaint));
  }
  loaded.emplace(library.sha256, Loaded{path, defines});
}

// Every operator of the graph is registered with the schema that the graph was traced with.
void check_operators(const Manifest& manifest, const std::vector<const Library*>& libraries) {
  for (const Operator& op : manifest.operators) {
    const size_t dot = op.name.find('.', op.name.find("::"));
    const c10::OperatorName name(op.name.substr(0, dot), dot == std::string::npos ? "" : op.name.substr(dot + 1));
    const auto registered = c10::Dispatcher::singleton().findSchema(name);
    if (!registered) {
      std::vector<std::string> names;
      for (const Library* library : libraries) names.push_back(file_name(library->record));
      throw Error(errors::kMissingLibrary,
                  "operator " + op.name + " is not loaded, and no library of the package gives it (libraries: " +
                      (names.empty() ? "none" : joined(names)) + ")",
                  "`exportkit package` adds the library; `--op-library` names one that is not exportkit's own.");
    }
    // Parsed, since the text of a schema may differ from one torch to another in no more than spelling.
    std::optional<c10::FunctionSchema> recorded;
    try {
      recorded.emplace(torch::jit::parseSchema(op.schema));
    } catch (const c10::Error&) {  // then it is no operator's
    }
    if (!recorded || !(registered->schema() == *recorded)) {
      throw Error(errors::kSchemaChanged,
                  "operator " + op.name + " is registered as " + c10::toString(registered->schema()) +
                      "; the package was made with " + op.schema,
                  "Export again with the library that is loaded, or load the one that the package was made with.");
    }
  }
}

}  // namespace

void load_operators(const PackageReader& reader, const Target& target, const std::string& torch, const Unpacking& how) {
  const std::vector<const Library*> libraries = libraries_for(reader.manifest(), target);
  for (const Library* library : libraries) {
    if (const auto reason = library_rejection(*library, torch)) {
      throw Error(errors::kTorchVersion,
                  "the operator library " + file_name(library->record) + " does not work here: " + *reason,
                  "Install the torch it works with, or build it for the stable ABI (torch/csrc/stable).");
    }
  }
  for (const Library* library : libraries) load(reader, *library, how);
  check_operators(reader.manifest(), libraries);
}

}  // namespace exportkit
