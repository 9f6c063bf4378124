// Loads a package in steps: opens and checks it, loads its operator libraries, loads its target.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "exportkit/runtime.h"
#include "package/cache.h"
#include "package/targets.h"
#include "package/trust.h"
#include "runtime/code.h"
#include "runtime/weights.h"

namespace exportkit {

// Loads operator libraries in a process without Python: each namespace from one build, once. exportkit/libraries.py
// does this in a process with Python.
//
// Loads a target's operator libraries and compares every operator of the graph with the manifest. The manifest is
// trusted to say which namespaces a library defines.
//
// Loading a second library for a registered namespace would end the process, so each library is first compared with the
// registered operators. TorchVersionError, LibraryConflictError, LibraryLoadError, MissingLibraryError,
// SchemaChangedError; the error of a wrong record.
void load_operators(const PackageReader& reader, const Target& target, const std::string& torch, const Unpacking& how);

// Opens the file of a package, once the options were checked.
using Opening = std::function<OpenedFile()>;

// A checked package. Opening it runs no code from it.
class OpenedPackage {
 public:
  // Opens a package, checks its required signatures and every digest, and picks a target that runs here. Runs no code
  // of the package. Throws the errors of exportkit.load.
  OpenedPackage(const Opening& open, OpenOptions options);
  // A package that the caller has opened and checked, and a target that it has loaded. Both must outlive this object.
  OpenedPackage(const PackageReader& reader, const std::string& target, c10::Device device);

  const PackageReader& reader() const { return reader_; }
  const Target& target() const { return *choice_.target; }
  c10::Device device() const;
  bool cuda_graphs() const { return options_.cuda_graphs != CudaGraphs::kNone; }

  // Loads the target's operator libraries and compares every operator of the graph with the manifest.
  void load_operators() const;
  // Unpacks the files of a method of the target.
  CacheEntry unpack_code(const Method& method) const;
  // Loads the compiled code of a method, after the operators: ModelLoadError. `weights` are on the model's device; they
  // and the files must outlive the code. DigestMismatchError: the package was written to since it was opened.
  std::shared_ptr<const Code> load_code(const Method& method, const CacheEntry& files, const Weights& weights) const;

 private:
  Unpacking unpacking() const;
  Choice verified_choice() const;

  OpenOptions options_;
  SignatureRequest asked_;
  std::optional<PackageReader> own_;
  const PackageReader& reader_;
  Choice choice_;
};

}  // namespace exportkit
