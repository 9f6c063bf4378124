// libFuzzer: decodes a manifest without checking digests. Any input is accepted or refused with an Error.
#include <cstdint>

#include "package/consistency.h"
#include "package/errors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const exportkit::Manifest manifest = exportkit::decode_manifest({reinterpret_cast<const char*>(data), size});
    exportkit::check_consistency(manifest);
    for (const exportkit::Target& target : manifest.targets) exportkit::libraries_for(manifest.libraries, target);
  } catch (const exportkit::Error&) {
  }
  return 0;
}
