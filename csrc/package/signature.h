// Detached signatures in this format's own form: FORMAT.md, "Signatures".
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

// A signature file: what was signed, and by whom.
struct Signatures {
  std::string manifest_sha256, file_sha256;
  std::vector<Signature> signatures;
};

// Reads a signature file strictly: SignatureError. `name` is the file's, for messages.
Signatures decode_signatures(std::string_view content, const std::string& name);

// The content of a signature file, which was read as such; nothing where there is none. SignatureError; UsageError
// where it may not be read.
std::optional<std::string> read_signatures(const std::filesystem::path& path);

// The first of the keys whose signature of the package with this manifest holds; null where none of them has signed.
// SignatureError: the file is of another package, or no key's signature holds and one was there.
const PublicKey* signer(const Signatures& signatures, const std::string& manifest_sha256,
                        const std::vector<PublicKey>& keys, const std::string& name);

}  // namespace exportkit
