// Signatures in the form of OpenSSF model signing, made with an elliptic curve key: a Sigstore bundle with a DSSE
// envelope around an in-toto statement. A package needs the digest of one file from it; any other content is refused.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "package/keys.h"
#include "package/package_file.h"

namespace exportkit::openssf {

// The parts of a bundle that are used.
struct Bundle {
  std::string key_id;              // of the key that the bundle names
  std::string payload, signature;  // base64
};

// Reads a bundle: SignatureError if it differs from the bundles that model signing makes with a key. `name` is the
// file's name, for messages.
Bundle decode(std::string_view content, const std::string& name);

// The sha256 of the one file in a statement, which is an envelope's payload: SignatureError.
std::string signed_digest(std::string_view statement, const std::string& name);

// The key that signed this package's file; null if the bundle names a key that is not in `keys`. Reads the file only
// after the signature is checked. SignatureError: the signature is not valid, or it signs another file.
const PublicKey* signer(const Bundle& bundle, const PackageFile& package, const std::vector<PublicKey>& keys,
                        const std::string& name);

}  // namespace exportkit::openssf
