#pragma once

#include <optional>
#include <tuple>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

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

template <class T>
struct FusedTexture {
  const T* rgb;
  T *lab, *sobel_x, *sobel_y;
  int64_t batch, height, width;
};

// `grad_luma` may be null.
template <class T>
struct LabToRgbGrad {
  const T *rgb, *grad_lab, *grad_luma;
  T* out;
  int64_t batch, height, width;
};

template <class T>
struct SobelGrad {
  const T *grad_x, *grad_y;
  T* out;
  int64_t batch, height, width;
};

template <class Device>
std::tuple<Tensor, Tensor, Tensor> fused_texture(const Tensor& rgb) {
  check_image("fused_texture", "rgb", rgb, 3, "[B, 3, H, W]");
  const Device device(rgb);
  const Tensor in = as_contiguous(rgb);
  const int64_t batch = in.size(0), height = in.size(2), width = in.size(3);
  Tensor lab = allocate(in, in.sizes()), sobel_x = allocate(in, {batch, 1, height, width}),
         sobel_y = allocate(in, {batch, 1, height, width});
  if (in.numel() == 0) return {lab, sobel_x, sobel_y};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, FusedTexture<T>{data_of<T>(in), data_of<T>(lab), data_of<T>(sobel_x), data_of<T>(sobel_y), batch,
                                height, width});
  });
  return {lab, sobel_x, sobel_y};
}

template <class Device>
Tensor lab_to_rgb_grad(const Tensor& rgb, const Tensor& grad_lab, const std::optional<Tensor>& grad_luma) {
  const char* op = "lab_to_rgb_grad";
  check_image(op, "rgb", rgb, 3, "[B, 3, H, W]");
  check_image(op, "grad_lab", grad_lab, 3, "[B, 3, H, W]");
  check_alike_images(op, "rgb", rgb, "grad_lab", grad_lab);
  if (grad_luma) {
    check_image(op, "grad_luma", *grad_luma, 1, "[B, 1, H, W]");
    check_alike_images(op, "rgb", rgb, "grad_luma", *grad_luma);
  }
  const Device device(rgb);
  const Tensor in = as_aligned(rgb), upstream = as_aligned(grad_lab);
  const std::optional<Tensor> luma = as_aligned(grad_luma);
  Tensor grad = allocate(in, in.sizes());
  if (in.numel() == 0) return grad;
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, LabToRgbGrad<T>{data_of<T>(in), data_of<T>(upstream), data_of<T>(luma), data_of<T>(grad), in.size(0),
                                in.size(2), in.size(3)});
  });
  return grad;
}

template <class Device>
Tensor sobel_grad(const Tensor& grad_x, const Tensor& grad_y) {
  const char* op = "sobel_grad";
  check_image(op, "grad_x", grad_x, 1, "[B, 1, H, W]");
  check_image(op, "grad_y", grad_y, 1, "[B, 1, H, W]");
  check_alike_images(op, "grad_x", grad_x, "grad_y", grad_y);
  const Device device(grad_x);
  const Tensor x = as_contiguous(grad_x), y = as_contiguous(grad_y);
  Tensor grad_luma = allocate(x, x.sizes());
  if (x.numel() == 0) return grad_luma;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, SobelGrad<T>{data_of<T>(x), data_of<T>(y), data_of<T>(grad_luma), x.size(0), x.size(2), x.size(3)});
  });
  return grad_luma;
}

}  // namespace arr_coc
