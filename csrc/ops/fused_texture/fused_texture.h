#pragma once

#include <optional>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/contiguous.h"

namespace arr_coc {

inline void check_image(const char* op, const char* name, const Tensor& image, int64_t channels, const char* layout) {
  check_rank(op, name, image, 4, layout);
  check_floating(op, name, image);
  check(image.size(1) == channels, op, ": ", name, " must be ", layout, ", got shape ", shape_of(image));
}

inline void check_alike_images(const char* op, const char* first_name, const Tensor& first, const char* name,
                               const Tensor& image) {
  check_alike(op, first_name, first, name, image);
  check_same_size(op, "B", name, image.size(0), first_name, first.size(0));
  check_same_size(op, "H", name, image.size(2), first_name, first.size(2));
  check_same_size(op, "W", name, image.size(3), first_name, first.size(3));
}

inline void check_fused_texture(const Tensor& rgb) { check_image("fused_texture", "rgb", rgb, 3, "[B, 3, H, W]"); }

inline void check_lab_to_rgb_grad(const Tensor& rgb, const Tensor& grad_lab, const std::optional<Tensor>& grad_luma) {
  const char* op = "lab_to_rgb_grad";
  check_image(op, "rgb", rgb, 3, "[B, 3, H, W]");
  check_image(op, "grad_lab", grad_lab, 3, "[B, 3, H, W]");
  check_alike_images(op, "rgb", rgb, "grad_lab", grad_lab);
  if (!grad_luma.has_value()) return;
  check_image(op, "grad_luma", *grad_luma, 1, "[B, 1, H, W]");
  check_alike_images(op, "rgb", rgb, "grad_luma", *grad_luma);
}

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::make_optional(as_contiguous(*tensor)) : std::nullopt;
}

template <class T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

inline void check_sobel_grad(const Tensor& grad_x, const Tensor& grad_y) {
  const char* op = "sobel_grad";
  check_image(op, "grad_x", grad_x, 1, "[B, 1, H, W]");
  check_image(op, "grad_y", grad_y, 1, "[B, 1, H, W]");
  check_alike_images(op, "grad_x", grad_x, "grad_y", grad_y);
}

}  // namespace arr_coc
