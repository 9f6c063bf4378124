// Whether a package is signed by somebody who is trusted here, found out before anything of it is executed. The twin of
// exportkit/package/trust.py and policy.py.
#pragma once

#include <string>
#include <vector>

#include "runtime/package/reader.h"

namespace exportkit {

// Checks that an open package is signed as its caller and this machine's policies ask for. With `reader.verify()`, the
// whole file is then what was signed.
//
// `public_keys`: any of them must have signed; none ask for no signature, and what a policy asks for stands.
// `signature`: the file; if empty, the package's name with `.sig`, beside the path or beside the file it links to.
//
// SignatureMissingError, SignatureError, PolicyError; UsageError where a key cannot be used.
void check_trust(const PackageReader& reader, const std::vector<std::string>& public_keys,
                 const std::string& signature);

}  // namespace exportkit
