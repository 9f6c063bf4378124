#include "package/trust.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "package/errors.h"
#include "package/json.h"
#include "package/openssf.h"
#include "package/signature.h"
#include "package/small_files.h"
#include "package/user_folders.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxDepth = 4;  // of brackets
constexpr const char *kOwnSuffix = ".sig", *kBundleSuffix = ".sigstore.json";

// A requirement for a signature by one of these keys.
struct Demand {
  std::vector<PublicKey> keys;
  std::string by;  // such as "the policy /etc/exportkit/policy.json"
};

struct Policy {
  bool require_signature = false;
  std::vector<std::string> public_keys;
};

[[noreturn]] void refuse(const fs::path& policy, const std::string& reason, const std::string& hint = "") {
  throw Error(errors::kPolicy, "the policy " + policy.string() + " " + reason,
              hint + "exportkit loads nothing until the policy is corrected.");
}

Policy parse_policy(std::string_view content) {
  JsonReader json(content, kMaxDepth);
  JsonReader whole = json;
  whole.skip();
  whole.end();
  if (!whole.oddity().empty()) throw JsonError("it contains " + whole.oddity());
  Policy policy;
  size_t seen = 0;
  json.object([&](std::string_view key) {
    ++seen;
    if (key == "version") {
      if (json.integer() != 1) json.fail("expected version 1");
    } else if (key == "require_signature") {
      policy.require_signature = json.boolean();
    } else if (key == "public_keys") {
      json.array([&] { policy.public_keys.push_back(json.string()); });
    } else {
      json.fail("unknown key");
    }
  });
  if (seen != 3) json.fail("object lacks a required key");
  return policy;
}

void add_demand(const fs::path& path, bool must_exist, std::vector<Demand>& demands) {
  Policy policy;
  try {
    const auto content = read_limited(path, /*guarded=*/true);
    if (!content && must_exist) refuse(path, "does not exist", "EXPORTKIT_POLICY names it. ");
    if (!content) return;
    policy = parse_policy(*content);
  } catch (const std::system_error& error) {
    refuse(path, "cannot be read: " + error.code().message());
  } catch (const JsonError& error) {
    refuse(path, std::string("does not follow FORMAT.md: ") + error.what());
  } catch (const std::invalid_argument& error) {
    refuse(path, error.what());
  }
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
  demands.push_back(std::move(demand));
}

fs::path user_policy() { return user_folder("XDG_CONFIG_HOME", ".config") / "policy.json"; }

// What this machine's policies require. A user's policy can add to the system's requirements, but not remove any.
std::vector<Demand> policy_demands(const fs::path& system) {
  std::vector<Demand> demands;
  const fs::path named = environment("EXPORTKIT_POLICY");
  add_demand(system, false, demands);
  add_demand(named.empty() ? user_policy() : named, !named.empty() && named != system, demands);
  return demands;
}

std::string some(const std::vector<std::string>& items) {
  constexpr size_t kShown = 4;
  std::string text = items.size() > 1 ? "keys " : "key ";
  for (size_t i = 0; i < std::min(items.size(), kShown); ++i) text += (i ? ", " : "") + items[i];
  return text + (items.size() > kShown ? " and " + std::to_string(items.size() - kShown) + " more" : "");
}

// A form of signature file: its file name suffix and the keys that check it.
struct Form {
  std::string suffix;
  std::vector<PublicKey> keys;
};

// The forms that these keys can check. If a given file could have either form, its name decides.
std::vector<Form> forms_of(const std::vector<PublicKey>& keys, const fs::path& given) {
  std::vector<Form> forms{{kOwnSuffix, {}}, {kBundleSuffix, {}}};
  for (const PublicKey& key : keys) forms[key.is_ed25519() ? 0 : 1].keys.push_back(key);
  std::erase_if(forms, [](const Form& form) { return form.keys.empty(); });
  if (!given.empty() && forms.size() > 1) {
    forms.erase(forms.begin() + (given.filename().string().ends_with(kBundleSuffix) ? 0 : 1));
  }
  return forms;
}

// The signature file beside the given path or, if there is none, beside the file that the path links to.
fs::path signature_beside(const fs::path& package, const std::string& suffix) {
  const fs::path file = package.string() + suffix;
  return fs::exists(fs::symlink_status(file)) ? file : fs::path(fs::weakly_canonical(package).string() + suffix);
}

// The key ids that a signature file names.
std::vector<std::string> key_ids(const std::string& suffix, std::string_view content, const std::string& name) {
  if (suffix == kBundleSuffix) return {openssf::decode(content, name).key_id};
  std::vector<std::string> ids;
  for (const Signature& signature : decode_signatures(content, name).signatures) ids.push_back(signature.key_id);
  return ids;
}

// The key that has signed; null if no key has.
const PublicKey* signer_of(const PackageFile& package, const Form& form, std::string_view content,
                           const std::string& name) {
  if (form.suffix == kBundleSuffix) return openssf::signer(openssf::decode(content, name), package, form.keys, name);
  return signer(decode_signatures(content, name), package.manifest_sha256(), form.keys, name);
}

PublicKey satisfy(const PackageFile& package, const Demand& demand, const fs::path& given) {
  std::string reasons;
  bool by_others = false;
  for (const Form& form : forms_of(demand.keys, given)) {
    const fs::path file = given.empty() ? signature_beside(package.path(), form.suffix) : given;
    const std::string name = file.filename().string();
    const auto content = read_signature_file(file);
    const PublicKey* signer = content ? signer_of(package, form, *content, name) : nullptr;
    if (signer != nullptr) return *signer;
    by_others = by_others || content.has_value();
    reasons += reasons.empty() ? "" : "; ";
    reasons += content ? file.string() + " has signatures by " + some(key_ids(form.suffix, *content, name))
                       : "there is no " + file.string();
  }
  std::vector<std::string> wanted;
  for (const PublicKey& key : demand.keys) wanted.push_back(key.id + " (" + key.source + ")");
  throw Error(errors::kSignatureMissing,
              package.name() + " is not signed as " + demand.by + " requires: " + reasons + "; wanted: " + some(wanted),
              by_others
                  ? "Others signed it. Ask who released it for the signature by a wanted key; do not sign it yourself."
                  : "Get the signature file that was released with it, or give its path if it has another name or "
                    "place. Who made the package signs it with `exportkit sign`.");
}

// The requirements of the caller and of this machine's policies.
std::vector<Demand> demands_of(const SignatureRequest& request, const std::string& system_policy) {
  std::vector<Demand> demands = policy_demands(system_policy);
  if (!request.public_keys.empty()) {
    Demand caller{{}, "the caller"};
    for (const std::string& key : request.public_keys) caller.keys.push_back(read_public_key(key));
    demands.insert(demands.begin(), std::move(caller));
  } else if (!request.signature.empty() && demands.empty()) {
    throw Error(errors::kUsage, "a signature file was given without a public key to check it",
                "Give the public key as well.");
  }
  return demands;
}

}  // namespace

std::vector<PublicKey> check_trust(const PackageFile& package, const SignatureRequest& request,
                                   const std::string& system_policy) {
  std::vector<PublicKey> signers;
  for (const Demand& demand : demands_of(request, system_policy)) {
    signers.push_back(satisfy(package, demand, request.signature));
  }
  return signers;
}

std::string demanded_by(const SignatureRequest& request) {
  const std::vector<Demand> demands = demands_of(request, kSystemPolicy);
  return demands.empty() ? "" : demands.front().by;
}

std::vector<SignatureFile> signature_files(const PackageFile& package) {
  std::vector<SignatureFile> found;
  for (const char* suffix : {kOwnSuffix, kBundleSuffix}) {
    SignatureFile file{signature_beside(package.path(), suffix), {}, {}};
    try {
      const auto content = read_signature_file(file.path);
      if (!content) continue;
      file.key_ids = key_ids(suffix, *content, file.path.filename().string());
    } catch (const Error& error) {
      file.problem = error.message();
    }
    found.push_back(std::move(file));
  }
  return found;
}

}  // namespace exportkit
