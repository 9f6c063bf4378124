// Means over patches of pixels on CUDA. compute_salience.cpp has the formulas.
#pragma once

#include "arr_coc/common/cosine.cuh"
#include "arr_coc/compute_salience/compute_salience.h"

namespace arr_coc {
namespace {

// One warp reads a patch; a whole block reads a patch with more pixels than this.
constexpr int64_t kWarpPatch = 1024;

// Sum over the warps that share a patch, to each of their threads.
template <int Warps, class A>
__device__ __forceinline__ A patch_sum(A value, A* shared) {
  if constexpr (Warps == 1) {
    return warp_sum(value);
  } else {
    return block_sum(value, shared);
  }
}

// Calls f(offset) for the calling thread's share of a patch's pixels, Pixels side by side. `thread` is 0 to Warps x
// kWarpSize - 1. Neighbouring threads take neighbouring pixels, and the loop has no division.
template <int Warps, int Pixels, class F>
__device__ __forceinline__ void for_pixels(const PatchGrid& grid, int thread, const F& f) {
  constexpr int kStride = Warps * kWarpSize;
  const int columns = int(grid.patch / Pixels), down = kStride / columns, right = kStride % columns;
  int64_t y = thread / columns;
  int x = thread % columns;
  while (y < grid.patch) {
    f(y * grid.width + x * Pixels);
    y += down, x += right;
    if (x >= columns) x -= columns, ++y;
  }
}

// Writes the mean gradient magnitude and mean colour of each patch to `patches` [B, kStatistics, N].
template <int Warps, int Pixels, class T, class A>
__global__ void __launch_bounds__(kCosineThreads)
    patch_means_kernel(const T* lab, const T* sobel_x, const T* sobel_y, A* patches, PatchGrid grid) {
  __shared__ A shared[kCosineWarps];
  constexpr int kPatches = kCosineWarps / Warps;
  constexpr bool kAligned = Pixels > 1;
  const int thread = threadIdx.x % (Warps * kWarpSize);
  const A area = A(grid.patch * grid.patch);
  for (int64_t item = int64_t(blockIdx.x) * kPatches + threadIdx.x / (Warps * kWarpSize);
       item < grid.batch * grid.count(); item += int64_t(gridDim.x) * kPatches) {
    const int64_t sample = item / grid.count(), corner = grid.corner(item % grid.count());
    const T *gx = sobel_x + sample * grid.plane + corner, *gy = sobel_y + sample * grid.plane + corner;
    const T* channel = lab + sample * 3 * grid.plane + corner;
    A sums[4] = {0, 0, 0, 0};
    for_pixels<Warps, Pixels>(grid, thread, [&](int64_t at) {
      A x[Pixels], y[Pixels], c[3][Pixels];
      load<kAligned>(gx, at, at + Pixels, x);
      load<kAligned>(gy, at, at + Pixels, y);
#pragma unroll
      for (int k = 0; k < 3; ++k) load<kAligned>(channel + k * grid.plane, at, at + Pixels, c[k]);
#pragma unroll
      for (int i = 0; i < Pixels; ++i) {
        sums[3] += sqrt(x[i] * x[i] + y[i] * y[i] + A(kEdgeFloor));
#pragma unroll
        for (int k = 0; k < 3; ++k) sums[k] += c[k][i];
      }
    });
    A* of_patch = patches + sample * kStatistics * grid.count() + item % grid.count();
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const A sum = patch_sum<Warps>(sums[k], shared);
      if (thread == 0) of_patch[(kColours + k) * grid.count()] = sum / area;
    }
    const A sum = patch_sum<Warps>(sums[3], shared);
    if (thread == 0) of_patch[kEdges * grid.count()] = sum / area;
  }
}

// Calls f(warps, pixels, blocks): how many warps take one patch and how many pixels a thread takes side by side, as
// types, and the grid that covers every patch. `aligned`: every channel starts on 16 bytes.
template <class T, class F>
void dispatch_patch(const PatchGrid& grid, bool aligned, const F& f) {
  const int64_t patches = grid.batch * grid.count();
  using Several = std::integral_constant<int, kPerLane<T>>;
  using One = std::integral_constant<int, 1>;
  using Block = std::integral_constant<int, kCosineWarps>;
  // If a patch's width is a multiple of 16 bytes, so is the image's, and the patch's rows start on 16 bytes.
  const bool several = aligned && grid.patch % kPerLane<T> == 0;
  // patch <= kWarpPatch first: the product could overflow.
  if (grid.patch <= kWarpPatch && grid.patch * grid.patch <= kWarpPatch) {
    const unsigned blocks = grid_size(patches, kCosineWarps);
    return several ? f(One{}, Several{}, blocks) : f(One{}, One{}, blocks);
  }
  return several ? f(Block{}, Several{}, grid_size(patches, 1)) : f(Block{}, One{}, grid_size(patches, 1));
}

template <class T, class A>
void launch_patch_means(const T* lab, const T* sobel_x, const T* sobel_y, A* patches, const PatchGrid& grid,
                        cudaStream_t stream) {
  dispatch_patch<T>(grid, start_on_16_bytes(lab, sobel_x, sobel_y), [&](auto warps, auto pixels, unsigned blocks) {
    patch_means_kernel<warps.value, pixels.value>
        <<<blocks, kCosineThreads, 0, stream>>>(lab, sobel_x, sobel_y, patches, grid);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace
}  // namespace arr_coc
