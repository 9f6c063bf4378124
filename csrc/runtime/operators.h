// The operator libraries of this process: one namespace, one build, once. The twin of exportkit/libraries.py.
#pragma once

#include <string>

#include "runtime/cache.h"
#include "runtime/package/reader.h"

namespace exportkit {

// Loads a target's operator libraries, and holds every operator of the graph against the manifest.
//
// Loading a second library that defines a registered namespace would end the process, so each is compared with what is
// registered first. TorchVersionError, LibraryConflictError, LibraryLoadError, MissingLibraryError, SchemaChangedError;
// the error of a record that does not hold.
void load_operators(const PackageReader& reader, const Target& target, const std::string& torch, const Unpacking& how);

}  // namespace exportkit
