// libFuzzer: a safetensors file is accepted or refused. An accepted file can be written and read again.
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "package/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace exportkit;
  std::vector<safetensors::View> views;
  try {
    views = safetensors::parse({reinterpret_cast<const char*>(data), size});
  } catch (const std::invalid_argument&) {
    return 0;
  }
  const std::string again = safetensors::serialize(views);
  if (safetensors::parse(again).size() != views.size()) abort();
  return 0;
}
