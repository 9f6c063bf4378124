// libFuzzer: decodes a bundle of OpenSSF model signing, or its statement, without checking signatures. Any input is
// accepted or refused with an Error.
#include <cstdint>
#include <string_view>

#include "package/errors.h"
#include "package/signature.h"
#include "package/text.h"

namespace {

template <class Read>
void taken_or_refused(const Read& read) {
  try {
    read();
  } catch (const exportkit::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace exportkit;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  taken_or_refused([&] { signed_digest(text, "it"); });
  taken_or_refused([&] {
    const Bundle bundle = decode_bundle(text, "it");
    decode_base64(bundle.signature);
    if (const auto statement = decode_base64(bundle.payload)) signed_digest(*statement, "it");
  });
  return 0;
}
