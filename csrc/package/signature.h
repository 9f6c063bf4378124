// Detached signatures in two forms. One is this format's own (FORMAT.md, "Signatures"). The other is OpenSSF model
// signing with an elliptic curve key: a Sigstore bundle with a DSSE envelope around an in-toto statement. Such a bundle
// must have the digest of one file; any other content is refused.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "package/keys.h"

namespace exportkit {

struct Signature {
  std::string key_id;
  std::string bytes;  // 64
};

// The content of a signature file: the signed digests and the signatures.
struct Signatures {
  std::string manifest_sha256, file_sha256;
  std::vector<Signature> signatures;
};

// Reads a signature file strictly: SignatureError. `name` is the file's name, for messages.
Signatures decode_signatures(std::string_view content, const std::string& name);

// Reads and checks a signature file and returns its content, or nothing if there is no file. SignatureError;
// UsageError if it cannot be read.
std::optional<std::string> read_signatures(const std::filesystem::path& path);

// The first key with a valid signature of the package with this manifest; null if no key has signed. SignatureError:
// the file belongs to another package, or the keys have signatures but none is valid.
const PublicKey* signer(const Signatures& signatures, const std::string& manifest_sha256,
                        const std::vector<PublicKey>& keys, const std::string& name);

class PackageFile;

// The parts of a bundle that are used.
struct Bundle {
  std::string key_id;              // of the key that the bundle names
  std::string payload, signature;  // base64
};

// Reads a bundle: SignatureError if it differs from the bundles that model signing makes with a key. `name` is the
// file's name, for messages.
Bundle decode_bundle(std::string_view content, const std::string& name);

// The sha256 of the one file in a statement, which is an envelope's payload: SignatureError.
std::string signed_digest(std::string_view statement, const std::string& name);

// The key that signed this package's file; null if the bundle names a key that is not in `keys`. Reads the file only
// after the signature is checked. SignatureError: the signature is not valid, or it signs another file.
const PublicKey* bundle_signer(const Bundle& bundle, const PackageFile& package, const std::vector<PublicKey>& keys,
                               const std::string& name);

}  // namespace exportkit
