// Public keys, which check signatures.
#pragma once

#include <memory>
#include <string>
#include <string_view>

struct evp_md_st;
struct evp_pkey_st;

namespace exportkit {

// An Ed25519 key, which checks this format's own signatures, or a key on the curve P-256, P-384 or P-521, which checks
// OpenSSF model signing bundles.
struct PublicKey {
  std::string id;      // sha256 of an Ed25519 key's 32 bytes, or of another key's PEM text, as in model signing
  std::string source;  // the file it came from, or "text"; for messages
  std::shared_ptr<evp_pkey_st> key;
  const evp_md_st* hash;  // for ECDSA; null for Ed25519, which includes its hash

  bool is_ed25519() const { return hash == nullptr; }
  // "sha256", "sha384" or "sha512"; empty for Ed25519.
  std::string hash_name() const;
  // Whether the signature is this key's signature of the message.
  bool verifies(std::string_view signature, std::string_view message) const;
};

// Reads a public key from a PEM file or from PEM text: UsageError. If `guarded`, refuses a file that other users can
// change or replace.
PublicKey read_public_key(const std::string& source, bool guarded = false);

}  // namespace exportkit
