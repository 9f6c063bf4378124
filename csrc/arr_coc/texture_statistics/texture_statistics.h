#pragma once

#include "arr_coc/fused_texture/fused_texture.h"

namespace arr_coc {

// The term that keeps the gradient magnitude smooth at zero, as in compute_salience.
constexpr double kMagnitudeFloor = 1e-8;

template <class T>
struct TextureStatistics {
  const T* rgb;
  T *colours, *edges;
  int64_t batch, height, width, patch_size;
};

template <class Device>
std::tuple<Tensor, Tensor> texture_statistics(const Tensor& rgb, int64_t patch_size) {
  const char* op = "texture_statistics";
  check_image(op, "rgb", rgb, 3, "[B, 3, H, W]");
  check_patch_size(op, rgb, patch_size);
  const Device device(rgb);
  const Tensor in = as_aligned(rgb);
  const int64_t batch = in.size(0), height = in.size(2), width = in.size(3);
  const int64_t rows = height / patch_size, columns = width / patch_size;
  Tensor colours = allocate(in, {batch, 3, rows, columns}), edges = allocate(in, {batch, 1, rows, columns});
  if (in.numel() == 0) return {colours, edges};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device,
        TextureStatistics<T>{data_of<T>(in), data_of<T>(colours), data_of<T>(edges), batch, height, width, patch_size});
  });
  return {colours, edges};
}

}  // namespace arr_coc
