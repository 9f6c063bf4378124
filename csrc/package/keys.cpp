#include "package/keys.h"

#include <dlfcn.h>

#include <array>
#include <new>
#include <optional>
#include <stdexcept>

#include "package/digests.h"
#include "package/errors.h"
#include "package/guarded.h"
#include "package/text.h"

extern "C" {
struct evp_md_ctx_st;
struct evp_pkey_ctx_st;
struct engine_st;
}

namespace exportkit {
namespace {

[[noreturn]] void missing(const std::string& why) {
  throw Error(errors::kHost, "OpenSSL 3, which checks signatures, cannot be used: " + why,
              "Install it (Debian and Ubuntu: apt-get install libssl3), or require no signature.");
}

void* function_of_libcrypto(const char* name) {
  void* library = open_libcrypto();
  if (library == nullptr) {
    const char* said = dlerror();
    missing(said == nullptr ? std::string("there is no ") + kLibcrypto : said);
  }
  void* const found = dlsym(library, name);
  if (found == nullptr) missing(std::string(kLibcrypto) + " has no " + name);
  return found;
}

// OpenSSL's functions used here, under their own names.
struct Libcrypto {
#define EXPORTKIT_CRYPTO(result, name, ...) \
  result (*name)(__VA_ARGS__) = reinterpret_cast<result (*)(__VA_ARGS__)>(function_of_libcrypto(#name))
  EXPORTKIT_CRYPTO(int, ERR_set_mark);
  EXPORTKIT_CRYPTO(int, ERR_pop_to_mark);
  EXPORTKIT_CRYPTO(evp_md_ctx_st*, EVP_MD_CTX_new);
  EXPORTKIT_CRYPTO(void, EVP_MD_CTX_free, evp_md_ctx_st*);
  EXPORTKIT_CRYPTO(int, EVP_DigestVerifyInit, evp_md_ctx_st*, evp_pkey_ctx_st**, const evp_md_st*, engine_st*,
                   evp_pkey_st*);
  EXPORTKIT_CRYPTO(int, EVP_DigestVerify, evp_md_ctx_st*, const uint8_t*, size_t, const uint8_t*, size_t);
  EXPORTKIT_CRYPTO(const evp_md_st*, EVP_sha256);
  EXPORTKIT_CRYPTO(const evp_md_st*, EVP_sha384);
  EXPORTKIT_CRYPTO(const evp_md_st*, EVP_sha512);
  EXPORTKIT_CRYPTO(int, EVP_EncodeBlock, uint8_t*, const uint8_t*, int);
  EXPORTKIT_CRYPTO(evp_pkey_st*, d2i_PUBKEY, evp_pkey_st**, const uint8_t**, long);
  EXPORTKIT_CRYPTO(int, i2d_PUBKEY, const evp_pkey_st*, uint8_t**);
  EXPORTKIT_CRYPTO(void, EVP_PKEY_free, evp_pkey_st*);
  EXPORTKIT_CRYPTO(int, EVP_PKEY_is_a, const evp_pkey_st*, const char*);
  EXPORTKIT_CRYPTO(const char*, EVP_PKEY_get0_type_name, const evp_pkey_st*);
  EXPORTKIT_CRYPTO(int, EVP_PKEY_get_group_name, const evp_pkey_st*, char*, size_t, size_t*);
  EXPORTKIT_CRYPTO(int, EVP_PKEY_get_raw_public_key, const evp_pkey_st*, uint8_t*, size_t*);
  EXPORTKIT_CRYPTO(int, EVP_PKEY_set_utf8_string_param, evp_pkey_st*, const char*, const char*);
#undef EXPORTKIT_CRYPTO
};

// HostError if this machine has no OpenSSL 3.
const Libcrypto& libcrypto() {
  static const Libcrypto found;  // retried after a failure
  return found;
}

constexpr std::string_view kBegin = "-----BEGIN PUBLIC KEY-----", kEnd = "-----END PUBLIC KEY-----";
constexpr size_t kPemLine = 64;
constexpr const char* kKinds = "Ed25519, or a key on the curve P-256, P-384 or P-521";
constexpr const char* kMakeOne =
    "Make one: openssl genpkey -algorithm ed25519 -out private.pem && openssl pkey -in private.pem -pubout -out "
    "public.pem";

using Key = evp_pkey_st;

// Discards OpenSSL's error records. Otherwise the next user of OpenSSL in this thread would read them as its own.
struct NothingNoted {
  NothingNoted() { libcrypto().ERR_set_mark(); }
  ~NothingNoted() { libcrypto().ERR_pop_to_mark(); }
};

void must(bool done) {
  if (!done) throw std::runtime_error("OpenSSL could not work with a public key");
}

const uint8_t* bytes(std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

std::string content_of(const std::string& path, const std::string& name, bool guarded) {
  try {
    if (auto content = read_limited(path, guarded)) return *std::move(content);
  } catch (const std::exception&) {
    throw Error(errors::kUsage, name + " " + file_problem());
  }
  throw Error(errors::kUsage, name + " cannot be read: No such file or directory");
}

// Parses PEM text; null if it is not a public key.
std::shared_ptr<Key> parse(std::string_view text) {
  const size_t begin = text.find(kBegin), end = text.find(kEnd);
  if (begin == std::string_view::npos || end == std::string_view::npos || end < begin + kBegin.size()) return nullptr;
  std::string letters(text.substr(begin + kBegin.size(), end - begin - kBegin.size()));
  std::erase_if(letters, [](char c) { return c == '\n' || c == '\r'; });
  const std::optional<std::string> der = decode_base64(letters);
  if (!der) return nullptr;
  const uint8_t* at = bytes(*der);
  std::shared_ptr<Key> key(libcrypto().d2i_PUBKEY(nullptr, &at, static_cast<long>(der->size())),
                           libcrypto().EVP_PKEY_free);
  return at == bytes(*der) + der->size() ? key : nullptr;
}

// The canonical PEM text: a named curve and an uncompressed point.
std::string pem_of(Key* key) {
  must(libcrypto().EVP_PKEY_set_utf8_string_param(key, "encoding", "named_curve") == 1);
  must(libcrypto().EVP_PKEY_set_utf8_string_param(key, "point-format", "uncompressed") == 1);
  const int size = libcrypto().i2d_PUBKEY(key, nullptr);
  must(size > 0);
  std::string der(static_cast<size_t>(size), '\0');
  auto* at = reinterpret_cast<uint8_t*>(der.data());
  must(libcrypto().i2d_PUBKEY(key, &at) == size);
  std::string letters((der.size() + 2) / 3 * 4 + 1, '\0');  // and a NUL
  letters.resize(static_cast<size_t>(libcrypto().EVP_EncodeBlock(reinterpret_cast<uint8_t*>(letters.data()), bytes(der),
                                                                 static_cast<int>(der.size()))));
  std::string text = std::string(kBegin) + "\n";
  for (size_t line = 0; line < letters.size(); line += kPemLine) text += letters.substr(line, kPemLine) + "\n";
  return text + std::string(kEnd) + "\n";
}

std::string raw_of(Key* key) {
  std::array<uint8_t, 32> raw;
  size_t size = raw.size();
  must(libcrypto().EVP_PKEY_get_raw_public_key(key, raw.data(), &size) == 1);
  return {raw.begin(), raw.end()};
}

// The key's curve, or its kind if it has no curve, by the names of Python's `cryptography`.
std::string kind_of(Key* key) {
  std::array<char, 64> curve;
  if (libcrypto().EVP_PKEY_get_group_name(key, curve.data(), curve.size(), nullptr) == 1 &&
      libcrypto().EVP_PKEY_is_a(key, "EC")) {
    const std::string_view name = curve.data();
    return name == "prime256v1" ? "secp256r1" : name == "prime192v1" ? "secp192r1" : std::string(name);
  }
  const char* kind = libcrypto().EVP_PKEY_get0_type_name(key);
  if (kind == nullptr) return "unknown";
  return libcrypto().EVP_PKEY_is_a(key, "ED448") ? "Ed448" : kind;
}

const evp_md_st* hash_for(std::string_view curve) {
  if (curve == "secp256r1") return libcrypto().EVP_sha256();
  if (curve == "secp384r1") return libcrypto().EVP_sha384();
  return curve == "secp521r1" ? libcrypto().EVP_sha512() : nullptr;
}

}  // namespace

bool PublicKey::verifies(std::string_view signature, std::string_view message) const {
  const NothingNoted nothing_noted;
  const std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context(libcrypto().EVP_MD_CTX_new(),
                                                                         libcrypto().EVP_MD_CTX_free);
  if (!context) throw std::bad_alloc();
  must(libcrypto().EVP_DigestVerifyInit(context.get(), nullptr, hash, nullptr, key.get()) == 1);
  // Only 1 means success: a signature of a wrong length is an error in OpenSSL.
  return libcrypto().EVP_DigestVerify(context.get(), bytes(signature), signature.size(), bytes(message),
                                      message.size()) == 1;
}

std::string PublicKey::hash_name() const {
  if (hash == nullptr) return "";
  return hash == libcrypto().EVP_sha256() ? "sha256" : hash == libcrypto().EVP_sha384() ? "sha384" : "sha512";
}

PublicKey read_public_key(const std::string& source, bool guarded) {
  const NothingNoted nothing_noted;
  const bool is_text = source.find("-----BEGIN") != std::string::npos;
  const std::string name = is_text ? "the public key given as text" : "the public key " + source;
  const std::string text = is_text ? source : content_of(source, name, guarded);
  if (text.find("PRIVATE KEY-----") != std::string::npos) {
    throw Error(errors::kUsage, name + " is a private key; only its owner may have it",
                "Make the public key from it: openssl pkey -in private.pem -pubout -out public.pem");
  }
  const std::shared_ptr<Key> key = parse(text);
  if (!key) throw Error(errors::kUsage, name + " is not a public key in PEM form", kMakeOne);
  const std::string origin = is_text ? "text" : source;
  if (libcrypto().EVP_PKEY_is_a(key.get(), "ED25519")) return {sha256_hex(raw_of(key.get())), origin, key, nullptr};
  const std::string kind = kind_of(key.get());
  if (const evp_md_st* hash = hash_for(kind)) return {sha256_hex(pem_of(key.get())), origin, key, hash};
  throw Error(errors::kUsage, name + " is of the kind " + kind + "; packages are signed with " + kKinds, kMakeOne);
}

}  // namespace exportkit
