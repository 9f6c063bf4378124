#include "package/state_digest.h"

#include "package/json_text.h"
#include "package/sha256.h"

namespace exportkit {
namespace {

std::string text_of(const Extent& extent) {
  if (const auto* fixed = std::get_if<int64_t>(&extent)) return std::to_string(*fixed);
  return json_text(std::get<Size>(extent).dimension);  // the state's sizes have scale 1 and offset 0
}

}  // namespace

std::string state_digest(const Manifest& manifest) {
  return sha256_hex(json_list(manifest.state, [](const StateTensor& tensor) {
    return json_object({{"name", json_text(tensor.name)},
                        {"dtype", json_text(tensor.dtype)},
                        {"shape", json_list(tensor.shape, text_of)}});
  }));
}

}  // namespace exportkit
