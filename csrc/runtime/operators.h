// Loads operator libraries in a process without Python: each namespace from one build, once. exportkit/libraries.py
// does this in a process with Python.
#pragma once

#include <string>

#include "package/cache.h"
#include "package/reader.h"

namespace exportkit {

// Loads a target's operator libraries and compares every operator of the graph with the manifest. The manifest is
// trusted to say which namespaces a library defines.
//
// Loading a second library for a registered namespace would end the process, so each library is first compared with the
// registered operators. TorchVersionError, LibraryConflictError, LibraryLoadError, MissingLibraryError,
// SchemaChangedError; the error of a wrong record.
void load_operators(const PackageReader& reader, const Target& target, const std::string& torch, const Unpacking& how);

}  // namespace exportkit
