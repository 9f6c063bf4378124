// The operator libraries of this process: one namespace, one build, once. The twin of exportkit/libraries.py.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/cache.h"
#include "runtime/package/reader.h"

namespace exportkit {

// An operator library that this process has.
struct LoadedLibrary {
  std::string sha256;
  std::filesystem::path path;        // the file it was loaded from
  std::set<std::string> namespaces;  // those it defined; none for one that only adds kernels
};

// An operator library that was unpacked and not loaded.
struct UnpackedLibrary {
  std::string sha256;
  std::filesystem::path path;
  CacheEntry entry;
};

struct OperatorLibraries {
  std::vector<LoadedLibrary> loaded;
  std::vector<UnpackedLibrary> unsure;  // none, or the operators of the graph are not yet checked
};

struct OperatorLoading {
  Unpacking unpacking;
  // A library may define a registered namespace that the manifest does not say it defines, which only another process
  // can find out. Where this is given, one that mentions such a namespace is left to the caller, unless the namespace
  // is among these: torch's own. Otherwise the manifest is believed.
  std::optional<std::set<std::string>> torch_namespaces;
};

// Loads a target's operator libraries, and holds every operator of the graph against the manifest.
//
// Loading a second library that defines a registered namespace would end the process, so each is compared with what is
// registered first. TorchVersionError, LibraryConflictError, LibraryLoadError, MissingLibraryError, SchemaChangedError;
// the error of a record that does not hold.
OperatorLibraries load_operators(const PackageReader& reader, const Target& target, const std::string& torch,
                                 const OperatorLoading& how);

// Makes known what something else loaded, which looks before it does as this does.
void know_library(LoadedLibrary library);

}  // namespace exportkit
