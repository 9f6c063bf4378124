// The keys that check signatures.
#pragma once

#include <memory>
#include <string>
#include <string_view>

struct evp_md_st;
struct evp_pkey_st;

namespace exportkit {

// An Ed25519 key, which checks this format's own signatures, or one on the curve P-256, P-384 or P-521, which checks
// bundles of OpenSSF model signing.
struct PublicKey {
  std::string id;      // sha256 of the 32 bytes of an Ed25519 key; of the PEM text of another, as model signing has it
  std::string source;  // where it came from, for messages
  std::shared_ptr<evp_pkey_st> key;
  const evp_md_st* hash;  // of ECDSA; null for Ed25519, which has its own

  bool is_ed25519() const { return hash == nullptr; }
  // Whether this key's owner signed this message.
  bool verifies(std::string_view signature, std::string_view message) const;
};

// A public key from a PEM file, or from PEM text: UsageError. A guarded file must be one that other users can neither
// change nor replace.
PublicKey read_public_key(const std::string& source, bool guarded = false);

}  // namespace exportkit
