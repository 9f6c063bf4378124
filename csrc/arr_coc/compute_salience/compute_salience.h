#pragma once

#include <cmath>
#include <tuple>
#include <vector>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

// The edge strength and the colour contrast with score one half; the term that keeps magnitudes smooth at zero.
constexpr double kEdgeHalf = 0.1;
constexpr double kContrastHalf = 25;
constexpr double kEdgeFloor = 1e-8;

#ifdef __CUDACC__
#define ARR_COC_ANYWHERE __host__ __device__
#else
#define ARR_COC_ANYWHERE
#endif

// The patches of a sample's image: `rows` x `columns` patches of `patch` x `patch` pixels, numbered row by row. `width`
// and `plane` are the pixels of an image row and of a whole channel.
struct PatchGrid {
  int64_t batch, rows, columns, patch, width, plane;

  PatchGrid(const Tensor& image, int64_t patch)
      : batch(image.size(0)),
        rows(image.size(2) / patch),
        columns(image.size(3) / patch),
        patch(patch),
        width(image.size(3)),
        plane(image.size(2) * image.size(3)) {}

  ARR_COC_ANYWHERE int64_t count() const { return rows * columns; }
  // Offset of patch n's first pixel within a channel.
  ARR_COC_ANYWHERE int64_t corner(int64_t n) const { return (n / columns * width + n % columns) * patch; }
};

// The statistics of each patch that the forward call computes for the gradient, [B, kStatistics, N]: the features'
// norm, their cosine with the mean, the mean edge strength, the mean L, a and b, and the mean distance of that colour
// from the neighbours'.
constexpr int64_t kNorms = 0, kCosines = 1, kEdges = 2, kColours = 3, kDistances = 6, kStatistics = 7;

// The weights of edges, colour contrast and features, divided by their sum.
struct SalienceWeights {
  double edges, contrast, features;

  explicit SalienceWeights(const std::vector<double>& weights) {
    const double sum = weights[0] + weights[1] + weights[2];
    edges = weights[0] / sum, contrast = weights[1] / sum, features = weights[2] / sum;
  }
};

inline void check_salience_weights(const char* op, const char* name, const std::vector<double>& weights) {
  check(weights.size() == 3, op, ": ", name, " must be 3 numbers, got ", weights.size());
  const double sum = weights[0] + weights[1] + weights[2];
  check(weights[0] >= 0 && weights[1] >= 0 && weights[2] >= 0 && sum > 0 && sum < HUGE_VAL, op, ": ", name,
        " must be finite and >= 0 with a sum > 0, got [", weights[0], ", ", weights[1], ", ", weights[2], "]");
}

inline void check_sobel(const char* op, const char* name, const Tensor& sobel, const Tensor& features) {
  check(sobel.dim() == 4 && sobel.size(1) == 1, op, ": ", name, " must be [B, 1, H, W], got shape ", shape_of(sobel));
  check_alike(op, "features", features, name, sobel);
  check_same_size(op, "B", name, sobel.size(0), "features", features.size(0));
}

inline void check_same_image(const char* op, const char* name, const Tensor& image, const char* other_name,
                             const Tensor& other) {
  check_same_size(op, "H", name, image.size(2), other_name, other.size(2));
  check_same_size(op, "W", name, image.size(3), other_name, other.size(3));
}

inline void check_patches(const char* op, const Tensor& features, const Tensor& image, int64_t patch_size) {
  check_patch_size(op, image, patch_size);
  check_same_size(op, "N", "features", features.size(1), "the grid of patches", PatchGrid(image, patch_size).count());
}

// Checks a statistic from the forward call. `layout` names its dimensions, whose sizes are `sizes`.
inline void check_statistic(const char* op, const char* name, const Tensor& statistic, const Tensor& features,
                            const char* layout, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  check_dtype(op, name, statistic, accumulate_dtype(features.scalar_type()));
  check(statistic.device() == features.device(), op, ": ", name, " and features must be on one device");
  check(statistic.sizes().equals(sizes), op, ": ", name, " must be ", layout, " of features ", shape_of(features),
        ", got shape ", shape_of(statistic));
}

template <class T>
struct Salience {
  using A = accumulate_t<T>;
  const T *features, *lab, *sobel_x, *sobel_y;
  T* out;
  A *mean_unit, *mean_norm, *patches;
  PatchGrid grid;
  int64_t width;  // D
  SalienceWeights weights;
};

// A null output is not computed.
template <class T>
struct SalienceGrad {
  using A = accumulate_t<T>;
  const T *grad, *features, *sobel_x, *sobel_y;
  const A *mean_unit, *mean_norm, *patches;
  T *grad_features, *grad_lab, *grad_x, *grad_y;
  PatchGrid grid;
  int64_t width;  // D
  SalienceWeights weights;
};

// Salience and the statistics for its gradient: see compute_salience_forward in compute_salience.py.
template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> salience_and_statistics(const char* op, const Tensor& features,
                                                                   const Tensor& lab, const Tensor& sobel_x,
                                                                   const Tensor& sobel_y, int64_t patch_size,
                                                                   const std::vector<double>& weights) {
  check_features(op, features);
  check(lab.dim() == 4 && lab.size(1) == 3, op, ": lab must be [B, 3, H, W], got shape ", shape_of(lab));
  check_alike(op, "features", features, "lab", lab);
  check_same_size(op, "B", "lab", lab.size(0), "features", features.size(0));
  check_sobel(op, "sobel_x", sobel_x, features);
  check_same_image(op, "sobel_x", sobel_x, "lab", lab);
  check_sobel(op, "sobel_y", sobel_y, features);
  check_same_image(op, "sobel_y", sobel_y, "lab", lab);
  check_patches(op, features, lab, patch_size);
  check_salience_weights(op, "weights", weights);
  const Device device(features);
  const Tensor x = as_aligned(features), pixels = as_aligned(lab), gx = as_aligned(sobel_x), gy = as_aligned(sobel_y);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2);
  const ScalarType wide = accumulate_dtype(x.scalar_type());
  Tensor salience = allocate(x, {batch, count}), mean_unit = allocate(x, {batch, width}, wide),
         mean_norm = allocate(x, {batch, 1}, wide), patches = allocate(x, {batch, kStatistics, count}, wide);
  if (batch * count == 0) return {salience, torch::stable::zero_(mean_unit), torch::stable::zero_(mean_norm), patches};
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    run(device, Salience<T>{data_of<T>(x), data_of<T>(pixels), data_of<T>(gx), data_of<T>(gy), data_of<T>(salience),
                            data_of<A>(mean_unit), data_of<A>(mean_norm), data_of<A>(patches),
                            PatchGrid(pixels, patch_size), width, SalienceWeights(weights)});
  });
  return {salience, mean_unit, mean_norm, patches};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> compute_salience_forward(const Tensor& features, const Tensor& lab,
                                                                    const Tensor& sobel_x, const Tensor& sobel_y,
                                                                    int64_t patch_size, std::vector<double> weights) {
  return salience_and_statistics<Device>("compute_salience_forward", features, lab, sobel_x, sobel_y, patch_size,
                                         weights);
}

template <class Device>
Tensor compute_salience(const Tensor& features, const Tensor& lab, const Tensor& sobel_x, const Tensor& sobel_y,
                        int64_t patch_size, std::vector<double> weights) {
  return std::get<0>(
      salience_and_statistics<Device>("compute_salience", features, lab, sobel_x, sobel_y, patch_size, weights));
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> compute_salience_grad(const Tensor& grad, const Tensor& features,
                                                                 const Tensor& sobel_x, const Tensor& sobel_y,
                                                                 const Tensor& mean_unit, const Tensor& mean_norm,
                                                                 const Tensor& patches, int64_t patch_size,
                                                                 std::vector<double> weights, bool need_features,
                                                                 bool need_lab, bool need_sobel_x, bool need_sobel_y) {
  const char* op = "compute_salience_grad";
  check_features(op, features);
  check_sobel(op, "sobel_x", sobel_x, features);
  check_sobel(op, "sobel_y", sobel_y, features);
  check_same_image(op, "sobel_y", sobel_y, "sobel_x", sobel_x);
  check_patches(op, features, sobel_x, patch_size);
  check_salience_weights(op, "weights", weights);
  const int64_t batch = features.size(0), count = features.size(1), width = features.size(2);
  check_statistic(op, "mean_unit", mean_unit, features, "[B, D]", {batch, width});
  check_statistic(op, "mean_norm", mean_norm, features, "[B, 1]", {batch, 1});
  check_statistic(op, "patches", patches, features, "[B, 7, N]", {batch, kStatistics, count});
  check_patch_grad(op, grad, features);
  const Device device(features);
  const Tensor g = as_contiguous(grad), x = as_contiguous(features), gx = as_contiguous(sobel_x),
               gy = as_contiguous(sobel_y), unit = as_contiguous(mean_unit), norm = as_contiguous(mean_norm),
               statistics = as_contiguous(patches);
  Tensor grad_features = allocate_if(need_features, x, x.sizes()),
         grad_lab = allocate_if(need_lab, gx, {gx.size(0), 3, gx.size(2), gx.size(3)}),
         grad_x = allocate_if(need_sobel_x, gx, gx.sizes()), grad_y = allocate_if(need_sobel_y, gy, gy.sizes());
  if (g.numel() == 0) return {grad_features, grad_lab, grad_x, grad_y};
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    run(device, SalienceGrad<T>{data_of<T>(g), data_of<T>(x), data_of<T>(gx), data_of<T>(gy), data_of<A>(unit),
                                data_of<A>(norm), data_of<A>(statistics), data_of<T>(grad_features),
                                data_of<T>(grad_lab), data_of<T>(grad_x), data_of<T>(grad_y), PatchGrid(gx, patch_size),
                                width, SalienceWeights(weights)});
  });
  return {grad_features, grad_lab, grad_x, grad_y};
}

}  // namespace arr_coc
