// OpenSSL 3, loaded when the first digest or signature is checked. The build does not need it, and digests can do
// without it.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct evp_md_ctx_st;
struct evp_md_st;
struct evp_pkey_st;
struct evp_pkey_ctx_st;
struct engine_st;
}

namespace exportkit {

// A function of the library, which becomes a pointer of its type: HostError if this machine has no OpenSSL 3.
class CryptoFunction {
 public:
  explicit CryptoFunction(const char* name);
  template <class F>
  operator F*() const {
    return reinterpret_cast<F*>(address_);
  }

 private:
  void* address_;
};

// OpenSSL's functions used here, under their own names.
struct Libcrypto {
#define EXPORTKIT_CRYPTO(result, name, ...) result (*name)(__VA_ARGS__) = CryptoFunction(#name)
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

// The library, which stays open; null without one, and dlerror() says why.
void* open_libcrypto();

// HostError if this machine has no OpenSSL 3.
const Libcrypto& libcrypto();

}  // namespace exportkit
