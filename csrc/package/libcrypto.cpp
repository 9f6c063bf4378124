#include "package/libcrypto.h"

#include <dlfcn.h>

#include <string>

#include "package/errors.h"

namespace exportkit {
namespace {

constexpr const char* kName = "libcrypto.so.3";

// Some wheels bring another OpenSSL under another name. With RTLD_DEEPBIND, libcrypto calls its own functions and not
// that one's, which would crash. Sanitizers end a process that uses this flag.
int binding() {
  const bool sanitized = dlsym(RTLD_DEFAULT, "__asan_init") != nullptr || dlsym(RTLD_DEFAULT, "__tsan_init") != nullptr;
  return RTLD_NOW | RTLD_LOCAL | (sanitized ? 0 : RTLD_DEEPBIND);
}

[[noreturn]] void missing(const std::string& why) {
  throw Error(errors::kHost, "OpenSSL 3, which checks signatures, cannot be used: " + why,
              "Install it (Debian and Ubuntu: apt-get install libssl3), or require no signature.");
}

Libcrypto open() {
  void* library = open_libcrypto();
  if (library == nullptr) {
    const char* said = dlerror();
    missing(said == nullptr ? std::string("there is no ") + kName : said);
  }
  Libcrypto found{};
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing(std::string(kName) + " has no " + name);
  };
#define EXPORTKIT_FIND(name) find(#name, found.name)
  EXPORTKIT_FIND(ERR_set_mark);
  EXPORTKIT_FIND(ERR_pop_to_mark);
  EXPORTKIT_FIND(EVP_MD_CTX_new);
  EXPORTKIT_FIND(EVP_MD_CTX_free);
  EXPORTKIT_FIND(EVP_DigestVerifyInit);
  EXPORTKIT_FIND(EVP_DigestVerify);
  EXPORTKIT_FIND(EVP_sha256);
  EXPORTKIT_FIND(EVP_sha384);
  EXPORTKIT_FIND(EVP_sha512);
  EXPORTKIT_FIND(d2i_PUBKEY);
  EXPORTKIT_FIND(i2d_PUBKEY);
  EXPORTKIT_FIND(EVP_PKEY_free);
  EXPORTKIT_FIND(EVP_PKEY_is_a);
  EXPORTKIT_FIND(EVP_PKEY_get0_type_name);
  EXPORTKIT_FIND(EVP_PKEY_get_group_name);
  EXPORTKIT_FIND(EVP_PKEY_get_raw_public_key);
  EXPORTKIT_FIND(EVP_PKEY_set_utf8_string_param);
#undef EXPORTKIT_FIND
  return found;
}

}  // namespace

void* open_libcrypto() { return dlopen(kName, binding()); }

const Libcrypto& libcrypto() {
  static const Libcrypto found = open();  // retried after a failure
  return found;
}

}  // namespace exportkit
