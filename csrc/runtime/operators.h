// The operator libraries of a process without Python: one namespace, one build, once. exportkit/libraries.py is for one
// with it.
#pragma once

#include <string>

#include "package/cache.h"
#include "package/reader.h"

namespace exportkit {

// Loads a target's operator libraries, and holds every operator of the graph against the manifest, which is believed
// where it says which namespaces a library defines.
//
// Loading a second library that defines a registered namespace would end the process, so each is compared with what is
// registered first. TorchVersionError, LibraryConflictError, LibraryLoadError, MissingLibraryError, SchemaChangedError;
// the error of a record that does not hold.
void load_operators(const PackageReader& reader, const Target& target, const std::string& torch, const Unpacking& how);

}  // namespace exportkit
