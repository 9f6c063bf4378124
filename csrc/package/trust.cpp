#include "package/trust.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "package/errors.h"
#include "package/guarded.h"
#include "package/json_fields.h"
#include "package/opened_file.h"
#include "package/signature.h"
#include "package/text.h"

namespace exportkit {

namespace {

namespace fs = std::filesystem;

constexpr int kPolicyDepth = 5, kListDepth = 4;    // of brackets
constexpr size_t kMaxListBytes = size_t{4} << 20;  // some 20,000 entries
constexpr size_t kMaxReasonBytes = 200;

std::string short_reason(JsonReader& json) {
  std::string reason = json.string();
  if (reason.size() > kMaxReasonBytes) json.fail("expected at most 200 bytes");
  return reason;
}

int64_t positive(JsonReader& json) {
  const int64_t value = json.integer();
  if (value < 1) json.fail("expected at least 1");
  return value;
}

// A list of {"<digest>": ..., "reason": ...}. A digest that is there twice is an error of whoever wrote the list.
auto reasons_by(const char* key) {
  return [=](JsonReader& json) {
    std::map<std::string, std::string> reasons;
    json.array([&] {
      std::string digest, reason;
      fields(json, field(key, digest, sha256), field("reason", reason, short_reason));
      if (!reasons.emplace(digest, reason).second) json.fail("the same digest is there twice");
    });
    return reasons;
  };
}

RevocationList parse_list(std::string_view content, const fs::path& path) {
  JsonReader json = JsonReader::checked(content, kListDepth);
  RevocationList list{path, 0, {}, {}};
  fields(json, unkept("version", version_1), field("sequence", list.sequence, positive),
         field("keys", list.keys, reasons_by("key_id")),
         field("packages", list.packages, reasons_by("manifest_sha256")));
  return list;
}

// The lists that apply on this machine. What one of them revokes is revoked.
using Revocations = std::vector<RevocationList>;

// Which list revokes a key, or a package, and why, such as "revoked by /etc/exportkit/revoked.json (stolen)"; empty if
// none does.
std::string revoked_by(const Revocations& lists, const std::string& id,
                       std::map<std::string, std::string> RevocationList::* what = &RevocationList::keys) {
  for (const RevocationList& list : lists) {
    const auto found = (list.*what).find(id);
    if (found == (list.*what).end()) continue;
    const std::string& reason = found->second;
    return "revoked by " + list.path.string() + (reason.empty() ? "" : " (" + printable(reason) + ")");
  }
  return "";
}

void check_package(const Revocations& lists, const PackageFile& package) {
  const std::string revoked = revoked_by(lists, package.manifest_sha256(), &RevocationList::packages);
  if (revoked.empty()) return;
  throw Error(errors::kRevoked,
              package.name() + " is " + revoked + ": its manifest has sha256 " + package.manifest_sha256(),
              "Get another release of it. No signature makes a revoked package valid again.");
}

// A requirement for a signature by one of these keys.
struct Demand {
  std::vector<PublicKey> keys;
  std::string by;  // such as "the policy /etc/exportkit/policy.json"
};

// A revocation list that a policy names.
struct NamedList {
  std::string path;
  int64_t minimum_sequence = 0;
};

struct Policy {
  bool require_signature = false;
  std::vector<std::string> public_keys;
  std::vector<NamedList> revocations;
};

// What a caller and this machine's policies require.
struct Rules {
  std::vector<Demand> demands;
  Revocations revoked;
};

[[noreturn]] void refuse(const fs::path& policy, const std::string& reason, const std::string& hint = "") {
  throw Error(errors::kPolicy, "the policy " + policy.string() + " " + reason,
              hint + "exportkit loads nothing until the policy is corrected.");
}

Policy parse_policy(std::string_view content) {
  JsonReader json = JsonReader::checked(content, kPolicyDepth);
  const auto named_list = object(field("list", &NamedList::path, text), FIELD(NamedList, minimum_sequence, integer));
  return object(FIELD(Policy, require_signature, boolean), FIELD(Policy, public_keys, list(text)),
                unkept("version", version_1), optional(FIELD(Policy, revocations, list(named_list))))(json);
}

// Reads a policy's list. A list that is missing, or older than the policy knows, is as bad as a bad policy: whoever
// removes or replaces a list must not make revoked keys valid again.
RevocationList read_list(const fs::path& policy, const NamedList& named) {
  const fs::path path = policy.parent_path() / named.path;
  const std::string list = "names the revocation list " + path.string() + ", which ";
  try {
    const auto content = read_limited(path, /*guarded=*/true, kMaxListBytes);
    if (!content) throw std::invalid_argument("does not exist");
    RevocationList found = parse_list(*content, path);
    if (found.sequence >= named.minimum_sequence) return found;
    refuse(policy, list + "has sequence " + std::to_string(found.sequence) + "; the policy requires at least " +
                       std::to_string(named.minimum_sequence));
  } catch (const std::exception&) {
    refuse(policy, list + file_problem());
  }
}

void add_policy(const fs::path& path, bool must_exist, Rules& rules) {
  Policy policy;
  try {
    const auto content = read_limited(path, /*guarded=*/true);
    if (!content && must_exist) refuse(path, "does not exist", "EXPORTKIT_POLICY names it. ");
    if (!content) return;
    policy = parse_policy(*content);
  } catch (const std::exception&) {
    refuse(path, file_problem());
  }
  for (const NamedList& named : policy.revocations) rules.revoked.push_back(read_list(path, named));
  if (!policy.require_signature) return;
  if (policy.public_keys.empty()) refuse(path, "requires signatures but names no public key");
  Demand demand{{}, "the policy " + path.string()};
  for (const std::string& key : policy.public_keys) {
    const bool text = key.find("-----BEGIN") != std::string::npos;
    try {
      demand.keys.push_back(read_public_key(text ? key : (path.parent_path() / key).string(), /*guarded=*/true));
    } catch (const Error& error) {
      refuse(path, "names a key that cannot be used: " + error.message());
    }
  }
  rules.demands.push_back(std::move(demand));
}

// What this machine's policies require. A user's policy can add to the system's requirements, but not remove any.
Rules policy_rules(const fs::path& system) {
  Rules rules;
  const fs::path named = environment("EXPORTKIT_POLICY");
  add_policy(system, false, rules);
  const fs::path user = named.empty() ? user_folder("XDG_CONFIG_HOME", ".config") / "policy.json" : named;
  add_policy(user, !named.empty() && named != system, rules);
  return rules;
}

std::string some_keys(const std::vector<std::string>& keys) {
  return (keys.size() > 1 ? "keys " : "key ") + some(keys, 4, [](const std::string& key) { return key; });
}

// A form of signature file: its file name suffix and the keys that check it.
struct Form {
  std::string suffix;
  std::vector<PublicKey> keys;
};

// Whether a given signature is a bundle: by its file's name, or by its content. None of our own form has such a text.
bool is_bundle(const SignatureRequest& given) {
  return given.signature.ends_with(kBundleSuffix) ||
         given.signature_content.find("\"dsseEnvelope\"") != std::string::npos;
}

// The forms that these keys can check. If a given signature could have either form, `is_bundle` decides.
std::vector<Form> forms_of(const std::vector<PublicKey>& keys, const SignatureRequest& given) {
  std::vector<Form> forms{{kOwnSuffix, {}}, {kBundleSuffix, {}}};
  for (const PublicKey& key : keys) forms[key.is_ed25519() ? 0 : 1].keys.push_back(key);
  std::erase_if(forms, [](const Form& form) { return form.keys.empty(); });
  if (!(given.signature.empty() && given.signature_content.empty()) && forms.size() > 1) {
    forms.erase(forms.begin() + (is_bundle(given) ? 0 : 1));
  }
  return forms;
}

// The signature file beside the given path or, if there is none, beside the file that the path links to.
fs::path signature_beside(const fs::path& package, const std::string& suffix) {
  const fs::path file = package.string() + suffix;
  return fs::exists(fs::symlink_status(file)) ? file : fs::path(fs::weakly_canonical(package).string() + suffix);
}

// A signature that is to be checked, and what messages call it.
struct FoundSignature {
  std::string place, name;
  std::optional<std::string> content;
};

FoundSignature signature_of(const PackageFile& package, const SignatureRequest& given, const std::string& suffix) {
  if (!given.signature_content.empty()) {
    if (given.signature_content.size() > kSmallFileBytes) {
      throw Error(errors::kSignature, concat("the signature has ", given.signature_content.size(),
                                             " bytes; one has at most ", kSmallFileBytes));
    }
    return {"the given signature", "the given signature", given.signature_content};
  }
  if (given.signature.empty() && package.path().empty()) return {"signature beside it", "", std::nullopt};
  if (given.signature.empty() && package.layer()) {
    const auto& signatures = package.layer()->signatures;
    const auto found = signatures.find(suffix);
    return {"layer *" + suffix, "layer *" + suffix,
            found == signatures.end() ? std::nullopt : std::optional(found->second)};
  }
  const fs::path file = given.signature.empty() ? signature_beside(package.path(), suffix) : fs::path(given.signature);
  return {file.string(), file.filename().string(), read_signature_file(file)};
}

// The key ids that a signature file names.
std::vector<std::string> key_ids(const std::string& suffix, std::string_view content, const std::string& name) {
  if (suffix == kBundleSuffix) return {decode_bundle(content, name).key_id};
  std::vector<std::string> ids;
  for (const Signature& signature : decode_signatures(content, name).signatures) ids.push_back(signature.key_id);
  return ids;
}

// The key that has signed; null if no key has.
const PublicKey* signer_of(const PackageFile& package, const Form& form, std::string_view content,
                           const std::string& name) {
  if (form.suffix == kBundleSuffix) return bundle_signer(decode_bundle(content, name), package, form.keys, name);
  return signer(decode_signatures(content, name), package.manifest_sha256(), form.keys, name);
}

[[noreturn]] void refuse_key(const std::string& what, const std::string& id, const std::string& revoked) {
  throw Error(errors::kRevoked, what + " key " + id + ", which is " + revoked,
              "Ask who released the package for a signature by a key that is valid.");
}

// The demand without its revoked keys: RevokedError if there is no other.
Demand without_revoked(const Demand& demand, const Revocations& revoked) {
  Demand rest{{}, demand.by};
  for (const PublicKey& key : demand.keys) {
    if (revoked_by(revoked, key.id).empty()) rest.keys.push_back(key);
  }
  if (rest.keys.empty()) {
    const std::string& id = demand.keys.front().id;
    refuse_key(demand.by + " accepts only", id, revoked_by(revoked, id));
  }
  return rest;
}

// Refuses a package that is signed only by revoked keys, although no signature is required: RevokedError.
void refuse_revoked_signers(const PackageFile& package, const Revocations& revoked) {
  if (std::ranges::all_of(revoked, [](const RevocationList& list) { return list.keys.empty(); })) return;
  std::string signer;
  for (const SignatureFile& file : signature_files(package)) {
    for (const std::string& id : file.key_ids) {
      if (revoked_by(revoked, id).empty()) return;
      signer = id;
    }
  }
  if (!signer.empty()) refuse_key(package.name() + " is signed only by", signer, revoked_by(revoked, signer));
}

PublicKey satisfy(const PackageFile& package, const Demand& demand, const SignatureRequest& given,
                  const Revocations& revoked) {
  std::string reasons;
  std::vector<std::string> others;  // the keys that signed it
  for (const Form& form : forms_of(demand.keys, given)) {
    const auto [place, name, content] = signature_of(package, given, form.suffix);
    const PublicKey* signer = content ? signer_of(package, form, *content, name) : nullptr;
    if (signer != nullptr) return *signer;
    const std::vector<std::string> ids = content ? key_ids(form.suffix, *content, name) : std::vector<std::string>();
    others.insert(others.end(), ids.begin(), ids.end());
    const std::string reason = content ? place + " has signatures by " + some_keys(ids) : "there is no " + place;
    if (reasons.find(reason) == std::string::npos) reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  const bool by_others = !others.empty();
  for (const SignatureFile& file : signature_files(package)) {
    others.insert(others.end(), file.key_ids.begin(), file.key_ids.end());
  }
  for (const std::string& id : others) {
    const std::string why = revoked_by(revoked, id);
    if (!why.empty())
      refuse_key(package.name() + " lacks a signature that " + demand.by + " requires; it has one by", id, why);
  }
  std::vector<std::string> wanted;
  for (const PublicKey& key : demand.keys) wanted.push_back(key.id + " (" + key.source + ")");
  throw Error(
      errors::kSignatureMissing,
      package.name() + " is not signed as " + demand.by + " requires: " + reasons + "; wanted: " + some_keys(wanted),
      by_others ? "Others signed it. Ask who released it for the signature by a wanted key; do not sign it yourself."
                : "Get the signature file that was released with it, or give its path if it has another name or "
                  "place. Who made the package signs it with `exportkit sign`.");
}

// The requirements of the caller and of this machine's policies.
Rules rules_of(const SignatureRequest& request, const std::string& system_policy) {
  Rules rules = policy_rules(system_policy);
  if (!request.public_keys.empty()) {
    Demand caller{{}, "the caller"};
    for (const std::string& key : request.public_keys) caller.keys.push_back(read_public_key(key));
    rules.demands.insert(rules.demands.begin(), std::move(caller));
  } else if (!(request.signature.empty() && request.signature_content.empty()) && rules.demands.empty()) {
    throw Error(errors::kUsage, "a signature was given without a public key to check it",
                "Give the public key as well.");
  }
  return rules;
}

}  // namespace

std::vector<PublicKey> check_trust(const PackageFile& package, const SignatureRequest& request,
                                   const std::string& system_policy) {
  const auto [demands, revoked] = rules_of(request, system_policy);
  check_package(revoked, package);
  if (demands.empty()) refuse_revoked_signers(package, revoked);
  std::vector<PublicKey> signers;
  for (const Demand& demand : demands) {
    signers.push_back(satisfy(package, without_revoked(demand, revoked), request, revoked));
  }
  return signers;
}

std::string demanded_by(const SignatureRequest& request) {
  const std::vector<Demand> demands = rules_of(request, kSystemPolicy).demands;
  return demands.empty() ? "" : demands.front().by;
}

std::vector<RevocationList> revocation_lists() { return policy_rules(kSystemPolicy).revoked; }

std::string revocations_text(const fs::path& path) {
  try {
    const std::string content = read_limited(path, /*guarded=*/false, kMaxListBytes).value_or("");
    if (!content.empty()) parse_list(content, path);
    return content;
  } catch (const std::exception&) {
    throw Error(errors::kUsage, "the revocation list " + path.string() + " " + file_problem());
  }
}

std::vector<SignatureFile> signature_files(const PackageFile& package) {
  std::vector<SignatureFile> found;
  if (package.path().empty()) return found;
  for (const char* suffix : {kOwnSuffix, kBundleSuffix}) {
    SignatureFile file;
    try {
      file.path = package.layer() ? fs::path("layer *") += suffix : signature_beside(package.path(), suffix);
      const auto [place, name, content] = signature_of(package, {}, suffix);
      if (!content) continue;
      file.key_ids = key_ids(suffix, *content, name);
    } catch (const Error& error) {
      file.problem = error.message();
    }
    found.push_back(std::move(file));
  }
  return found;
}

}  // namespace exportkit
