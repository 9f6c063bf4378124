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

}  // namespace

void* open_libcrypto() { return dlopen(kName, binding()); }

CryptoFunction::CryptoFunction(const char* name) {
  void* library = open_libcrypto();
  if (library == nullptr) {
    const char* said = dlerror();
    missing(said == nullptr ? std::string("there is no ") + kName : said);
  }
  address_ = dlsym(library, name);
  if (address_ == nullptr) missing(std::string(kName) + " has no " + name);
}

const Libcrypto& libcrypto() {
  static const Libcrypto found;  // retried after a failure
  return found;
}

}  // namespace exportkit
