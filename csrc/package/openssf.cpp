#include "package/openssf.h"

#include <algorithm>
#include <functional>

#include "package/errors.h"
#include "package/json_fields.h"
#include "package/text.h"

namespace exportkit::openssf {
namespace {

constexpr int kMaxDepth = 16;  // of brackets; model signing nests 5
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
    JsonReader json(content, kMaxDepth), whole = json;
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

Bundle decode(std::string_view content, const std::string& name) {
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

const PublicKey* signer(const Bundle& bundle, const PackageFile& package, const std::vector<PublicKey>& keys,
                        const std::string& name) {
  const auto key =
      std::find_if(keys.begin(), keys.end(), [&](const PublicKey& one) { return one.id == bundle.key_id; });
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

}  // namespace exportkit::openssf
