// Detached signatures in this format's own form (FORMAT.md, "Signatures").
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

}  // namespace exportkit
