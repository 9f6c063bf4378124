// Signatures in the form of OpenSSF model signing, made with an elliptic curve key. A Sigstore bundle with a DSSE
// envelope around an in-toto statement; of what that form can say, a package needs one thing, the digest of one file,
// and everything else is refused.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "package/keys.h"
#include "package/package_file.h"

namespace exportkit::openssf {

// What of a bundle is looked at.
struct Bundle {
  std::string key_id;              // of the key that it says it was made with
  std::string payload, signature;  // base64
};

// Reads a bundle: SignatureError where it is none as model signing makes it with a key. `name` is the file's, for
// messages.
Bundle decode(std::string_view content, const std::string& name);

// The sha256 that a statement, an envelope's payload, has for the one file it is about: SignatureError.
std::string signed_digest(std::string_view statement, const std::string& name);

// The key that made a bundle over this package's file, which is read once the signature holds; null where it is none of
// these, which are on elliptic curves. SignatureError: the signature does not hold, or it is of another file.
const PublicKey* signer(const Bundle& bundle, const PackageFile& package, const std::vector<PublicKey>& keys,
                        const std::string& name);

}  // namespace exportkit::openssf
