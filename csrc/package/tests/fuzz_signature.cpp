// libFuzzer: a signature file in this format's own form is refused as a SignatureError, or has one meaning.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "package/errors.h"
#include "package/signature.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const exportkit::Signatures read =
        exportkit::decode_signatures({reinterpret_cast<const char*>(data), size}, "the file");
    for (const exportkit::Signature& signature : read.signatures) {
      if (signature.bytes.size() != 64 || signature.key_id.size() != 64) abort();
    }
    exportkit::signer(read, read.manifest_sha256, {}, "the file");
  } catch (const exportkit::Error& error) {
    if (std::string_view(error.name()) != "SignatureError") abort();
  }
  return 0;
}
