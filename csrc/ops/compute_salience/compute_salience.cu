#include <torch/csrc/stable/library.h>

#include "common/column_units.cuh"
#include "common/rows.cuh"
#include "ops/compute_salience/compute_salience.h"
#include "ops/compute_salience/patches.cuh"

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
    of_sample[kNorms * cut.rows + n] = norm, of_sample[kCosines * cut.rows + n] = cosine;
    const A distance = Contrast<A>(of_sample + kColours * cut.rows, grid, n).distance,
            strength = of_sample[kEdges * cut.rows + n], edge = strength / (strength + A(kEdgeHalf)),
            contrast = distance / (distance + A(kContrastHalf));
    out[sample * cut.rows + n] =
        T(edge_weight * edge + contrast_weight * contrast + features_weight * (1 - cosine) / 2);
  }
}

// Computes h (unit - c f / |f|) / |f| + shared for the rows of a chunk. A thread takes some columns of all rows and
// reads the values that rows share once. The last samples come first, because a cache may still hold them.
template <bool Aligned, class T, class A>
__global__ void features_grad_kernel(const T* features, Slopes<A> slopes, const A* unit, const A* shared, T* out,
                                     ColumnCut cut, int64_t slabs) {
  constexpr int kPer = kPerLane<T>, kDeep = 8;  // rows in flight
  const int64_t width = cut.width, items = cut.batch * cut.chunks * slabs;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t which = items - 1 - item, at = (which % slabs * blockDim.x + threadIdx.x) * kPer;
    if (at >= width) continue;
    const int64_t chunk = which / slabs % cut.chunks, sample = which / slabs / cut.chunks;
    const int64_t begin = sample * cut.rows + chunk * cut.chunk_rows,
                  end = min(begin + cut.chunk_rows, (sample + 1) * cut.rows);
    A u[kPer], common[kPer];
    load<Aligned>(unit + sample * width, at, width, u);
    load<Aligned>(shared + sample * width, at, width, common);
    for (int64_t first = begin; first < end; first += kDeep) {
      T rows[kDeep][kPer];
#pragma unroll
      for (int r = 0; r < kDeep; ++r)
        if (first + r < end) load<Aligned>(features + (first + r) * width, at, width, rows[r]);
#pragma unroll
      for (int r = 0; r < kDeep; ++r) {
        if (first + r >= end) continue;
        const A scale = slopes.features[first + r], along = slopes.along[first + r];
        A result[kPer];
#pragma unroll
        for (int i = 0; i < kPer; ++i) result[i] = scale * (u[i] - along * A(rows[r][i])) + common[i];
        store<Aligned>(out + (first + r) * width, at, width, result);
      }
    }
  }
}

template <class T, class A = accumulate_t<T>>
void features_grad(const Cuda& device, const SalienceGrad<T>& call, const Slopes<A>& slopes) {
  const cudaStream_t stream = device.stream();
  const ColumnCut cut(call.grid.batch, call.grid.count(), call.width);
  Scratch<A> partial(device, cut.partial_size()), shared(device, cut.batch * cut.width);
  launch_column_sums<T, A>(call.features, slopes.features, nullptr, partial.data(), cut, stream);
  launch_through_unit<A>(partial.data(), cut, call.mean_unit, call.mean_norm, nullptr, 1 / A(cut.rows), shared.data(),
                         stream);
  const ColumnBlocks blocks = column_blocks<T>(cut);
  const bool aligned = is_vectorisable(call.features, cut.width) && is_vectorisable(call.grad_features, cut.width) &&
                       is_vectorisable(call.mean_unit, cut.width);
  const auto kernel = aligned ? features_grad_kernel<true, T, A> : features_grad_kernel<false, T, A>;
  kernel<<<blocks.count, blocks.threads, 0, stream>>>(call.features, slopes, call.mean_unit, shared.data(),
                                                      call.grad_features, cut, blocks.slabs);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// `gradients` is memory for [B, N, 3].
template <class T, class A = accumulate_t<T>>
void pixels_grad(const Cuda& device, const SalienceGrad<T>& call, const Slopes<A>& slopes, A* gradients) {
  const cudaStream_t stream = device.stream();
  const PatchGrid& grid = call.grid;
  if (call.grad_lab) {
    colour_gradient_kernel<<<grid_size(grid.batch * grid.count(), kCosineThreads), kCosineThreads, 0, stream>>>(
        call.patches, slopes.contrast, gradients, grid);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  // If a patch's width is a multiple of 16 bytes, so is the image's, and the patch's rows start on 16 bytes.
  const bool several = start_on_16_bytes(call.sobel_x, call.sobel_y, call.grad_lab, call.grad_x, call.grad_y) &&
                       grid.patch % kPerLane<T> == 0;
  const Strips strips(grid, grid.width / (several ? kPerLane<T> : 1));
  const auto kernel = several ? pixels_grad_kernel<kPerLane<T>, T, A> : pixels_grad_kernel<1, T, A>;
  kernel<<<grid_size(strips.count, 1), kCosineThreads, 0, stream>>>(
      call.sobel_x, call.sobel_y, gradients, slopes.edges, call.grad_lab, call.grad_x, call.grad_y, grid, strips);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

template <class T>
void run(const Cuda& device, const Salience<T>& call) {
  using A = accumulate_t<T>;
  const cudaStream_t stream = device.stream();
  const ColumnCut cut(call.grid.batch, call.grid.count(), call.width);
  Scratch<A> partial(device, cut.partial_size());
  launch_patch_means(call.lab, call.sobel_x, call.sobel_y, call.patches, call.grid, stream);
  launch_column_sums<T, A>(call.features, nullptr, nullptr, partial.data(), cut, stream);
  launch_mean_unit<A>(partial.data(), call.mean_unit, call.mean_norm, cut, stream);
  const auto kernel =
      is_vectorisable(call.features, call.width) ? salience_kernel<true, T, A> : salience_kernel<false, T, A>;
  kernel<<<grid_size(cut.batch * ((cut.rows + kRows - 1) / kRows), kCosineWarps), kCosineThreads, 0, stream>>>(
      call.features, call.mean_unit, call.patches, call.out, cut, call.grid, A(call.weights.edges),
      A(call.weights.contrast), A(call.weights.features));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T>
void run(const Cuda& device, const SalienceGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t count = call.grid.batch * call.grid.count();
  Scratch<A> memory(device, 7 * count);
  A* free = memory.data();
  const Slopes<A> slopes{free, free + count, free + 2 * count, free + 3 * count};
  slopes_kernel<<<grid_size(count, kCosineThreads), kCosineThreads, 0, device.stream()>>>(
      call.grad, call.patches, slopes, call.grid, call.weights);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (call.grad_features) features_grad(device, call, slopes);
  if (call.grad_lab || call.grad_x || call.grad_y) pixels_grad(device, call, slopes, free + 4 * count);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("compute_salience", TORCH_BOX(&compute_salience<Cuda>));
  m.impl("compute_salience_forward", TORCH_BOX(&compute_salience_forward<Cuda>));
  m.impl("compute_salience_grad", TORCH_BOX(&compute_salience_grad<Cuda>));
}

}  // namespace arr_coc
