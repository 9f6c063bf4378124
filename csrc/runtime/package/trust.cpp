#include "runtime/package/trust.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <system_error>

#include "runtime/package/errors.h"
#include "runtime/package/json.h"
#include "runtime/package/signature.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSystemPolicy = "/etc/exportkit/policy.json";
constexpr int kMaxDepth = 4;  // of brackets

// Somebody asks for a signature by any of these keys.
struct Demand {
  std::vector<PublicKey> keys;
  std::string by;  // such as "the policy /etc/exportkit/policy.json"
};

struct Policy {
  bool require_signature = false;
  std::vector<std::string> public_keys;
};

[[noreturn]] void refuse(const fs::path& policy, const std::string& reason) {
  throw Error(errors::kPolicy, "the policy " + policy.string() + " " + reason,
              "As long as this is so, nothing is loaded.");
}

Policy parse_policy(std::string_view content) {
  JsonReader json(content, kMaxDepth);
  JsonReader whole = json;
  whole.skip();
  whole.end();
  if (!whole.oddity().empty()) throw JsonError("it holds " + whole.oddity());
  Policy policy;
  size_t seen = 0;
  json.object([&](std::string_view key) {
    ++seen;
    if (key == "version") {
      if (json.integer() != 1) json.fail("a version other than 1");
    } else if (key == "require_signature") {
      policy.require_signature = json.boolean();
    } else if (key == "public_keys") {
      json.array([&] { policy.public_keys.push_back(json.string()); });
    } else {
      json.fail("an unknown key");
    }
  });
  if (seen != 3) json.fail("an object without a key that it must have");
  return policy;
}

void add_demand(const fs::path& path, bool must_exist, std::vector<Demand>& demands) {
  Policy policy;
  try {
    const auto content = read_small(path, /*guarded=*/true);
    if (!content && must_exist) refuse(path, "is not there, and EXPORTKIT_POLICY names it");
    if (!content) return;
    policy = parse_policy(*content);
  } catch (const std::system_error& error) {
    refuse(path, "cannot be read: " + error.code().message());
  } catch (const JsonError& error) {
    refuse(path, std::string("is not JSON of the shape FORMAT.md gives: ") + error.what());
  } catch (const std::invalid_argument& error) {
    refuse(path, error.what());
  }
  if (!policy.require_signature) return;
  if (policy.public_keys.empty()) refuse(path, "requires signatures, and names no public key to check them with");
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

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

fs::path user_policy() {
  // The XDG specification: a relative path in it is to be ignored.
  if (const fs::path base = variable("XDG_CONFIG_HOME"); base.is_absolute()) return base / "exportkit" / "policy.json";
  std::string home = variable("HOME");
  if (home.empty()) {
    const passwd* user = getpwuid(getuid());
    home = user == nullptr ? "~" : user->pw_dir;
  }
  return fs::path(home) / ".config" / "exportkit" / "policy.json";
}

// What this machine's policies ask of every package. What a user sets can add to what the system demands, and take
// nothing from it.
std::vector<Demand> policy_demands() {
  std::vector<Demand> demands;
  const fs::path named = variable("EXPORTKIT_POLICY");
  add_demand(kSystemPolicy, false, demands);
  add_demand(named.empty() ? user_policy() : named, !named.empty() && named != kSystemPolicy, demands);
  return demands;
}

std::string listed(const std::vector<PublicKey>& keys) {
  std::string text = keys.size() > 1 ? "keys " : "key ";
  for (const PublicKey& key : keys) text += (&key == &keys.front() ? "" : ", ") + key.id + " (" + key.source + ")";
  return text;
}

// The signature file beside the name that was given; if there is none, beside the file that it links to.
fs::path signature_beside(const fs::path& package) {
  const fs::path file = package.string() + ".sig";
  return fs::exists(fs::symlink_status(file)) ? file : fs::path(fs::weakly_canonical(package).string() + ".sig");
}

void satisfy(const PackageReader& reader, const Demand& demand, const fs::path& file) {
  const std::string package = reader.path().filename().string();
  std::vector<PublicKey> keys;  // those of the form that is checked here
  for (const PublicKey& key : demand.keys) {
    if (!key.raw.empty()) keys.push_back(key);
  }
  if (keys.empty()) {
    throw Error(
        errors::kSignatureMissing,
        package + " is to be signed as " + demand.by + " asks for, by keys that are not Ed25519",
        "The C++ runtime does not check bundles of OpenSSF model signing: use Python's (EXPORTKIT_RUNTIME=python).");
  }
  std::string reason = "there is no " + file.string();
  try {
    if (const auto content = read_small(file)) {
      const Signatures signatures = decode_signatures(*content, file.filename().string());
      if (signer(signatures, reader.manifest_sha256(), keys, file.filename().string()) != nullptr) return;
      reason = file.string() + " has signatures by other keys";
    }
  } catch (const std::system_error& error) {
    throw Error(errors::kUsage, "cannot read the signature file " + file.string() + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kSignature, "the signature file " + file.filename().string() + " " + error.what());
  }
  throw Error(errors::kSignatureMissing,
              package + " is not signed as " + demand.by + " asks for: " + reason + "; wanted: " + listed(keys),
              "`exportkit sign` signs a package; a signature file of another name or place must be given.");
}

}  // namespace

void check_trust(const PackageReader& reader, const std::vector<std::string>& public_keys,
                 const std::string& signature) {
  std::vector<Demand> demands = policy_demands();
  if (!public_keys.empty()) {
    Demand caller{{}, "the caller"};
    for (const std::string& key : public_keys) caller.keys.push_back(read_public_key(key));
    demands.insert(demands.begin(), std::move(caller));
  } else if (!signature.empty() && demands.empty()) {
    throw Error(errors::kUsage, "a signature file was given, and no public key to check it with",
                "Give the key as well.");
  }
  const fs::path file = signature.empty() ? signature_beside(reader.path()) : fs::path(signature);
  for (const Demand& demand : demands) satisfy(reader, demand, file);
}

}  // namespace exportkit
