// Checks that a trusted key signed a package, before any of its code runs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "package/reader.h"

namespace exportkit {

// The content of a revocation list: keys whose signatures no longer count, and packages that are not opened (FORMAT.md,
// "Revocation"). Both maps have the reasons; a reason may be empty.
struct RevocationList {
  std::filesystem::path path;
  int64_t sequence = 0;                         // rises by one with each change of the list
  std::map<std::string, std::string> keys;      // by key id
  std::map<std::string, std::string> packages;  // by the manifest's sha256
};

// Returns the text of a revocation list, or nothing in it if there is no file. Other users may change the list. Throws
// UsageError if it cannot be read or does not follow FORMAT.md.
std::string revocations_text(const std::filesystem::path& path);

inline constexpr const char* kSystemPolicy = "/etc/exportkit/policy.json";

// The signature that a caller requires, in addition to this machine's policies.
struct SignatureRequest {
  // PEM files or PEM text. One of these keys must have signed. If empty, the caller requires no signature.
  std::vector<std::string> public_keys = {};
  // The signature file. If empty: the package's name with `.sig`, or `.sigstore.json` for a bundle, beside the path or
  // beside the file that it links to. A package that has no path has nothing beside it.
  std::string signature = {};
  // The content of a signature file, in place of one.
  std::string signature_content = {};
};

// Checks that an open package has the signatures that its caller and this machine's policies require. A signature
// covers the manifest and, through its digests, every record: after `PackageReader::verify` the whole file is known to
// be the signed one. A bundle of OpenSSF model signing covers the file, which is read to check it.
//
// Refuses what the policies' revocation lists name, before any signature is read.
//
// Returns a key with a valid signature for the caller, then for each policy; empty if nobody requires one. Tests set
// `system_policy` to another place.
//
// RevokedError, SignatureMissingError, SignatureError, PolicyError; UsageError if a key cannot be used; HostError
// without OpenSSL.
std::vector<PublicKey> check_trust(const PackageFile& package, const SignatureRequest& request,
                                   const std::string& system_policy = kSystemPolicy);

// Who requires a signature, such as "the caller" or "the policy /etc/exportkit/policy.json"; empty if nobody does.
// Throws the errors that check_trust throws before it reads a signature.
std::string demanded_by(const SignatureRequest& request);

// The revocation lists that this machine's policies name: PolicyError.
std::vector<RevocationList> revocation_lists();

// A signature file beside a package. Its content is not checked.
struct SignatureFile {
  std::filesystem::path path;
  std::vector<std::string> key_ids;
  std::string problem;  // why it cannot be read; empty if it can
};

std::vector<SignatureFile> signature_files(const PackageFile& package);

}  // namespace exportkit
