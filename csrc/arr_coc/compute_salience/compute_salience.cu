#include <torch/csrc/stable/library.h>

#include "arr_coc/common/column_units.cuh"
#include "arr_coc/common/rows.cuh"
#include "arr_coc/compute_salience/compute_salience.h"
#include "arr_coc/compute_salience/gradient.cuh"
#include "arr_coc/compute_salience/patches.cuh"

namespace arr_coc {
namespace {

// See compute_salience.cpp for the formulas.

// A warp takes kRows rows. The last samples come first, because a cache may still hold them from computing the mean.
template <bool Aligned, class T, class A>
__global__ void salience_kernel(const T* features, const A* unit, A* patches, T* out, ColumnCut cut, PatchGrid grid,
                                A edge_weight, A contrast_weight, A features_weight) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t per_sample = (cut.rows + kRows - 1) / kRows, items = cut.batch * per_sample;
  for (int64_t at = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; at < items;
       at += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t item = items - 1 - at, sample = item / per_sample, first = item % per_sample * kRows;
    const int rows = int(min(int64_t(kRows), cut.rows - first));
    A squares[kRows], products[kRows][1];
    row_products<1, Aligned>(features + (sample * cut.rows + first) * cut.width, rows, unit + sample * cut.width, 1,
                             cut.width, squares, products);
    A norm = 0, cosine = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (lane == r) norm = sqrt(squares[r]), cosine = products[r][0] * inverse_norm(norm);
    if (lane >= rows) continue;  // the warp meets again at its next shuffle
    const int64_t n = first + lane;
    A* of_sample = patches + sample * kStatistics * cut.rows;
    const A distance = mean_distance<A>(of_sample + kColours * cut.rows, Place(n, grid.rows, grid.columns)),
            strength = of_sample[kEdges * cut.rows + n], edge = strength / (strength + A(kEdgeHalf)),
            contrast = distance / (distance + A(kContrastHalf));
    of_sample[kNorms * cut.rows + n] = norm, of_sample[kCosines * cut.rows + n] = cosine;
    of_sample[kDistances * cut.rows + n] = distance;
    out[sample * cut.rows + n] =
        T(edge_weight * edge + contrast_weight * contrast + features_weight * (1 - cosine) / 2);
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const Salience<T>& call) {
  using A = accumulate_t<T>;
  const ColumnCut cut(call.grid.batch, call.grid.count(), call.width);
  Scratch<A> partial(device, cut.partial_size());
  launch_patch_means(call.lab, call.sobel_x, call.sobel_y, call.patches, call.grid, device);
  launch_column_sums<T, A>(call.features, nullptr, nullptr, partial.data(), cut, device);
  launch_mean_unit<A>(partial.data(), call.mean_unit, call.mean_norm, cut, device);
  const auto kernel =
      has_whole_vectors(call.features, call.width) ? salience_kernel<true, T, A> : salience_kernel<false, T, A>;
  device.launch(kernel, {grid_size(cut.batch * ((cut.rows + kRows - 1) / kRows), kCosineWarps), kCosineThreads},
                call.features, call.mean_unit, call.patches, call.out, cut, call.grid, A(call.weights.edges),
                A(call.weights.contrast), A(call.weights.features));
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("compute_salience", TORCH_BOX(&compute_salience<Cuda>));
  m.impl("compute_salience_forward", TORCH_BOX(&compute_salience_forward<Cuda>));
  m.impl("compute_salience_grad", TORCH_BOX(&compute_salience_grad<Cuda>));
}

}  // namespace arr_coc
