// A package on its way to a model: opened and checked; then its operator libraries are loaded, then its target.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "exportkit/runtime.h"
#include "package/targets.h"
#include "runtime/operators.h"
#include "runtime/session.h"
#include "runtime/weights.h"

namespace exportkit {

// One that was checked, and of which nothing was executed.
class OpenedPackage {
 public:
  // Opens a package. Nothing of it is executed: it is known to be signed as it must be, that every digest holds, and
  // which of its targets runs here. The errors are exportkit.load's.
  OpenedPackage(const std::string& path, OpenOptions options);

  const PackageReader& reader() const { return reader_; }
  const Target& target() const { return *choice_.target; }
  c10::Device device() const;

  // Loads the target's operator libraries, and holds every operator of the graph against the manifest.
  void load_operators() const;
  // The target's files.
  CacheEntry unpack_target() const;
  // Its compiled code, which needs the operators to be loaded: ModelLoadError. The weights and the files must outlive
  // it. DigestMismatchError: somebody wrote into the package since it was opened.
  std::shared_ptr<const Session> load_target(const CacheEntry& files, const Weights& weights) const;

 private:
  Unpacking unpacking() const;
  Choice verified_choice() const;

  OpenOptions options_;
  SignatureRequest asked_;
  PackageReader reader_;
  Choice choice_;
};

}  // namespace exportkit
