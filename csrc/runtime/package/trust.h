// Whether a package is signed by somebody who is trusted here, found out before anything of it is executed. The twin of
// exportkit/package/trust.py and policy.py.
#pragma once

#include <string>
#include <vector>

#include "runtime/package/reader.h"

namespace exportkit {

inline constexpr const char* kSystemPolicy = "/etc/exportkit/policy.json";

// Checks that an open package is signed as its caller and this machine's policies ask for. The signature covers the
// manifest, and through it every record: with `reader.verify()` the whole file is what was signed. A bundle of OpenSSF
// model signing, made with an elliptic curve key, covers the file, which is read for it.
//
// `public_keys`: any of them must have signed; none ask for no signature, and what a policy asks for stands.
// `signature`: the file; if empty, the package's name with `.sig`, or `.sigstore.json` for a bundle, beside the path or
// beside the file it links to.
// `system_policy`: another place for it is for tests.
//
// SignatureMissingError, SignatureError, PolicyError; UsageError where a key cannot be used.
void check_trust(const PackageReader& reader, const std::vector<std::string>& public_keys, const std::string& signature,
                 const std::string& system_policy = kSystemPolicy);

}  // namespace exportkit
