#include "package/signature.h"

#include <algorithm>
#include <set>

#include "package/errors.h"
#include "package/json_fields.h"
#include "package/small_files.h"
#include "package/text.h"

namespace exportkit {
namespace {

constexpr int kMaxDepth = 4;  // of brackets

std::string signature_bytes(JsonReader& json) {
  const std::string text = json.string();
  const auto bytes = text.size() == 88 ? decode_base64(text) : std::nullopt;
  if (!bytes || bytes->size() != 64) json.fail("expected 64 bytes in base64");
  return *bytes;
}

Signature read_signature(JsonReader& json) {
  Signature out;
  std::string algorithm;
  fields(json, field("key_id", out.key_id, sha256), field("algorithm", algorithm, one_of("ed25519")),
         field("signature", out.bytes, signature_bytes));
  return out;
}

Signatures read_signatures(JsonReader& json, const std::string& name) {
  Signatures out;
  int64_t version = 0;
  fields(json, field("format_version", version, integer), field("manifest_sha256", out.manifest_sha256, sha256),
         field("file_sha256", out.file_sha256, sha256), field("signatures", out.signatures, list(read_signature)));
  if (out.signatures.empty()) json.fail("expected at least one signature");
  std::set<std::string> ids;
  for (const Signature& signature : out.signatures) {
    if (!ids.insert(signature.key_id).second) {
      throw Error(errors::kSignature, "the signature file " + name + " has two signatures by key " + signature.key_id);
    }
  }
  return out;
}

void check_version(JsonReader json, const std::string& name) {
  if (json.peek() != JsonReader::Kind::kObject || !json.seek("format_version") ||
      json.peek() != JsonReader::Kind::kNumber || !json.at_integer()) {
    json.fail("expected an object with an integer `format_version`");
  }
  if (const std::string_view version = json.number_text(); version != "1") {
    throw Error(errors::kSignature,
                "the signature file " + name + " has format version " + std::string(version.substr(0, 40)) +
                    "; this exportkit reads 1",
                "Install an exportkit that reads it, or sign the package again.");
  }
}

}  // namespace

Signatures decode_signatures(std::string_view content, const std::string& name) {
  try {
    JsonReader json = JsonReader::checked(content, kMaxDepth);
    check_version(json, name);
    return read_signatures(json, name);
  } catch (const JsonError& error) {
    throw Error(errors::kSignature, "the signature file " + name + " does not follow FORMAT.md: " + error.what());
  }
}

std::optional<std::string> read_signatures(const std::filesystem::path& path) {
  std::optional<std::string> content = read_signature_file(path);
  if (content) decode_signatures(*content, path.filename().string());
  return content;
}

const PublicKey* signer(const Signatures& signatures, const std::string& manifest_sha256,
                        const std::vector<PublicKey>& keys, const std::string& name) {
  if (signatures.manifest_sha256 != manifest_sha256) {
    throw Error(errors::kSignature,
                name + " signs another package: its manifest has sha256 " + signatures.manifest_sha256 +
                    ", this package's manifest has " + manifest_sha256,
                "The package was changed or replaced after it was signed, or the signature belongs to another build.");
  }
  const std::string statement = "exportkit package signature 1\nmanifest-sha256 " + signatures.manifest_sha256 +
                                "\nfile-sha256 " + signatures.file_sha256 + "\n";
  const PublicKey* present = nullptr;
  for (const PublicKey& key : keys) {
    const auto given = std::find_if(signatures.signatures.begin(), signatures.signatures.end(),
                                    [&](const Signature& signature) { return signature.key_id == key.id; });
    if (given == signatures.signatures.end()) continue;
    if (key.verifies(given->bytes, statement)) return &key;
    if (present == nullptr) present = &key;
  }
  if (present == nullptr) return nullptr;
  throw Error(errors::kSignature,
              name + ": the signature by key " + present->id + " (" + present->source + ") is not valid",
              "The signature file was changed after it was written. Get it again.");
}

}  // namespace exportkit
