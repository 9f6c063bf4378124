// Detached signatures, and the keys that check them: FORMAT.md, "Signatures". The twin of
// exportkit/package/signature.py.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace exportkit {

// An Ed25519 key. Of another kind, `raw` is empty: bundles of OpenSSF model signing are not checked here.
struct PublicKey {
  std::string raw;     // 32 bytes
  std::string id;      // their sha256
  std::string source;  // where it came from, for messages
};

struct Signature {
  std::string key_id;
  std::string bytes;  // 64
};

// A signature file: what was signed, and by whom.
struct Signatures {
  std::string manifest_sha256, file_sha256;
  std::vector<Signature> signatures;
};

// A public key from a PEM file, or from PEM text: UsageError. A guarded file must be one that other users can neither
// change nor replace.
PublicKey read_public_key(const std::string& source, bool guarded = false);

// Reads a signature file strictly: SignatureError. `name` is the file's, for messages.
Signatures decode_signatures(std::string_view content, const std::string& name);

// The first of the keys whose signature of the package with this manifest holds; null where none of them has signed.
// SignatureError: the file is of another package, or no key's signature holds and one was there.
const PublicKey* signer(const Signatures& signatures, const std::string& manifest_sha256,
                        const std::vector<PublicKey>& keys, const std::string& name);

// A file of at most 64 KiB; nothing where there is none. std::system_error where it cannot be read,
// std::invalid_argument where it is no plain file, too large, or not guarded: "is not a plain file".
std::optional<std::string> read_small(const std::filesystem::path& path, bool guarded = false);

}  // namespace exportkit
