#pragma once

#include "ops/fused_texture/fused_texture.h"

namespace arr_coc {

// The term that keeps the gradient magnitude smooth at zero, as in compute_salience.
constexpr double kMagnitudeFloor = 1e-8;

inline void check_texture_statistics(const Tensor& rgb, int64_t patch_size) {
  const char* op = "texture_statistics";
  check_image(op, "rgb", rgb, 3, "[B, 3, H, W]");
  check(patch_size > 0, op, ": patch_size must be >= 1, got ", patch_size);
  check(rgb.size(2) % patch_size == 0, op, ": H = ", rgb.size(2), " is not a multiple of patch_size = ", patch_size);
  check(rgb.size(3) % patch_size == 0, op, ": W = ", rgb.size(3), " is not a multiple of patch_size = ", patch_size);
}

}  // namespace arr_coc
