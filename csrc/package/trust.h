// Whether a package is signed by somebody who is trusted here, found out before anything of it is executed.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "package/keys.h"
#include "package/package_file.h"

namespace exportkit {

inline constexpr const char* kSystemPolicy = "/etc/exportkit/policy.json";

// What a caller asks for, beside what this machine's policies ask for.
struct SignatureRequest {
  // PEM files, or PEM text: any of them must have signed. None ask for no signature.
  std::vector<std::string> public_keys;
  // The signature file; if empty, the package's name with `.sig`, or `.sigstore.json` for a bundle, beside the path or
  // beside the file it links to.
  std::string signature;
};

// Checks that an open package is signed as its caller and this machine's policies ask for. The signature covers the
// manifest, and through it every record: with `PackageReader::verify` the whole file is what was signed. A bundle of
// OpenSSF model signing, made with an elliptic curve key, covers the file, which is read for it.
//
// Gives a key whose signature holds, for the caller and then for each policy; nothing where nobody asks.
// `system_policy`: another place for it is for tests.
//
// SignatureMissingError, SignatureError, PolicyError; UsageError where a key cannot be used; HostError without OpenSSL.
std::vector<PublicKey> check_trust(const PackageFile& package, const SignatureRequest& request,
                                   const std::string& system_policy = kSystemPolicy);

// Who asks for a signature, such as "the caller" or "the policy /etc/exportkit/policy.json"; empty where nobody does.
// The errors are those of check_trust before it looks at a signature.
std::string demanded_by(const SignatureRequest& request);

// A signature file beside a package, as it describes itself: nothing of it is checked.
struct SignatureFile {
  std::filesystem::path path;
  std::vector<std::string> key_ids;
  std::string problem;  // why it cannot be read, if it cannot
};

std::vector<SignatureFile> signature_files(const PackageFile& package);

}  // namespace exportkit
