#include "package/signature.h"

#include <algorithm>
#include <functional>
#include <set>

#include "package/errors.h"
#include "package/guarded.h"
#include "package/json_fields.h"
#include "package/reader.h"
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

constexpr auto read_signature = object(FIELD(Signature, key_id, sha256), unkept("algorithm", one_of("ed25519")),
                                       field("signature", &Signature::bytes, signature_bytes));

Signatures read_signatures(JsonReader& json, const std::string& name) {
  Signatures out;
  fields(json, unkept("format_version", integer), field("manifest_sha256", out.manifest_sha256, sha256),
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

void check_version(const JsonReader& json, const std::string& name) {
  const std::string_view version = format_version(json);
  if (version.empty()) json.fail("expected an object with an integer `format_version`");
  if (version == "1") return;
  throw Error(
      errors::kSignature,
      concat("the signature file ", name, " has format version ", version.substr(0, 40), "; this exportkit reads 1"),
      "Install an exportkit that reads it, or sign the package again.");
}

// --- OpenSSF model signing -------------------------------------------------------------------------------------------

constexpr int kBundleDepth = 16;  // of brackets; model signing nests 5
constexpr std::string_view kBundle = "application/vnd.dev.sigstore.bundle.v0.3+json";
constexpr std::string_view kPayload = "application/vnd.in-toto+json";
constexpr std::string_view kStatement = "https://in-toto.io/Statement/v1";
constexpr std::string_view kPredicate = "https://model_signing/signature/v1.0";
constexpr std::string_view kWholeFile = ".";  // model signing's name for a model that is one file

void read_only_item(JsonReader& json, const std::function<void()>& read) {
  size_t count = 0;
  json.array([&] { ++count == 1 ? read() : json.skip(); });
  if (count != 1) json.fail("expected a list of one item, found " + std::to_string(count));
}

void expect(JsonReader& json, std::string_view value) {
  if (json.string() != value) json.fail("expected " + shown(value));
}

template <class Read>
void decode_strictly(std::string_view content, const std::string& name, const Read& read) {
  try {
    JsonReader json(content, kBundleDepth), whole = json;
    whole.skip();  // refuses JSON that two parsers could read differently
    whole.end();
    if (whole.has_half_pair()) throw JsonError("it contains a string with half of a surrogate pair");
    read(json);
  } catch (const JsonError& error) {
    throw Error(errors::kSignature,
                name + " is not a model signing bundle of one file, made with an elliptic curve key: " + error.what());
  }
}

std::string base64(const std::string& text, const std::string& name) {
  if (auto bytes = decode_base64(text)) return *std::move(bytes);
  throw Error(errors::kSignature, name + " contains invalid base64");
}

// The signed message, DSSE's PAE: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md.
std::string pre_authentication(const std::string& payload) {
  return concat("DSSEv1 ", kPayload.size(), " ", kPayload, " ", payload.size(), " ", payload);
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
    const auto given = std::ranges::find(signatures.signatures, key.id, &Signature::key_id);
    if (given == signatures.signatures.end()) continue;
    if (key.verifies(given->bytes, statement)) return &key;
    if (present == nullptr) present = &key;
  }
  if (present == nullptr) return nullptr;
  throw Error(errors::kSignature,
              name + ": the signature by key " + present->id + " (" + present->source + ") is not valid",
              "The signature file was changed after it was written. Get it again.");
}

Bundle decode_bundle(std::string_view content, const std::string& name) {
  Bundle bundle;
  decode_strictly(content, name, [&](JsonReader& json) {
    const auto read_key = [&] { read_members(json, {{"hint", [&] { bundle.key_id = json.sha256(); }}}); };
    const auto read_signature = [&] { read_members(json, {{"sig", [&] { bundle.signature = json.string(); }}}); };
    const auto read_envelope = [&] {
      read_members(json, {{"payload", [&] { bundle.payload = json.string(); }},
                          {"payloadType", [&] { expect(json, kPayload); }},
                          {"signatures", [&] { read_only_item(json, read_signature); }}});
    };
    read_members(json, {{"mediaType", [&] { expect(json, kBundle); }},
                        {"verificationMaterial", [&] { read_members(json, {{"publicKey", read_key}}); }},
                        {"dsseEnvelope", read_envelope}});
  });
  return bundle;
}

std::string signed_digest(std::string_view statement, const std::string& name) {
  std::string digest;
  decode_strictly(statement, name, [&](JsonReader& json) {
    const auto read_resource = [&] {
      read_members(json, {{"name", [&] { expect(json, kWholeFile); }},
                          {"algorithm", [&] { expect(json, "sha256"); }},
                          {"digest", [&] { digest = json.sha256(); }}});
    };
    const auto read_serialization = [&] { read_members(json, {{"method", [&] { expect(json, "files"); }}}); };
    const auto read_predicate = [&] {
      read_members(
          json, {{"resources", [&] { read_only_item(json, read_resource); }}, {"serialization", read_serialization}});
    };
    read_members(json, {{"_type", [&] { expect(json, kStatement); }},
                        {"predicateType", [&] { expect(json, kPredicate); }},
                        {"predicate", read_predicate}});
  });
  return digest;
}

const PublicKey* bundle_signer(const Bundle& bundle, const PackageFile& package, const std::vector<PublicKey>& keys,
                               const std::string& name) {
  const auto key = std::ranges::find(keys, bundle.key_id, &PublicKey::id);
  if (key == keys.end()) return nullptr;
  const std::string statement = base64(bundle.payload, name);
  if (!key->verifies(base64(bundle.signature, name), pre_authentication(statement))) {
    throw Error(errors::kSignature, name + ": the signature by key " + key->id + " (" + key->source + ") is not valid",
                "The bundle was changed after it was written. Get it again.");
  }
  const std::string digest = signed_digest(statement, name);
  if (digest != package.sha256()) {
    throw Error(errors::kSignature,
                name + " signs another file: that file has sha256 " + digest + ", the package has " + package.sha256(),
                "The package was changed or replaced after it was signed, or the signature belongs to another build.");
  }
  return &*key;
}

}  // namespace exportkit
