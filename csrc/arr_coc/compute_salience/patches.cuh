// Means over patches of pixels on CUDA, and how much a patch's mean colour differs from its neighbours'.
// compute_salience.cpp has the formulas.
#pragma once

#include "arr_coc/common/cosine.cuh"
#include "arr_coc/common/cuda.cuh"
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

template <class T, class A>
void launch_patch_means(const T* lab, const T* sobel_x, const T* sobel_y, A* patches, const PatchGrid& grid,
                        const Cuda& device) {
  // If a patch's width is a multiple of 16 bytes, so is the image's, and the patch's rows start on 16 bytes.
  constexpr int kPixels = kVector<T>;
  const bool several = start_on_16_bytes(lab, sobel_x, sobel_y) && grid.patch % kPixels == 0;
  // patch <= kWarpPatch first: the product could overflow.
  const bool by_warp = grid.patch <= kWarpPatch && grid.patch * grid.patch <= kWarpPatch;
  constexpr int kAll = kCosineWarps;
  const auto kernel = by_warp ? (several ? patch_means_kernel<1, kPixels, T, A> : patch_means_kernel<1, 1, T, A>)
                              : (several ? patch_means_kernel<kAll, kPixels, T, A> : patch_means_kernel<kAll, 1, T, A>);
  device.launch(kernel, {grid_size(grid.batch * grid.count(), by_warp ? kCosineWarps : 1), kCosineThreads}, lab,
                sobel_x, sobel_y, patches, grid);
}

}  // namespace

constexpr int kAround = 9, kItself = 4;  // the 3 x 3 patches around a patch, row by row

// Patch n of a grid, and what is around it.
struct Place {
  int64_t n, row, column, rows, columns;

  __device__ __forceinline__ Place(int64_t n, int64_t rows, int64_t columns)
      : n(n), row(n / columns), column(n - row * columns), rows(rows), columns(columns) {}

  // Whether there is a neighbour at one of the 9 places.
  __device__ __forceinline__ bool has(int around) const {
    const int64_t i = row + around / 3 - 1, j = column + around % 3 - 1;
    return around != kItself && i >= 0 && i < rows && j >= 0 && j < columns;
  }

  __device__ __forceinline__ int64_t neighbour(int around) const {
    return n + (around / 3 - 1) * columns + around % 3 - 1;
  }

  // At least 1, because it divides.
  __device__ __forceinline__ int neighbours() const {
    const int down = 1 + (row > 0) + (row + 1 < rows), right = 1 + (column > 0) + (column + 1 < columns);
    return max(down * right - 1, 1);
  }
};

// The mean distance of a patch's colour from its neighbours'; 0 without neighbours. `colours` are the sample's, [3, N].
// All loads come before the first root, which has a branch.
template <class A, class T>
__device__ __forceinline__ A mean_distance(const T* colours, const Place& at) {
  const int64_t count = at.rows * at.columns;
  A squares[kAround];
#pragma unroll
  for (int i = 0; i < kAround; ++i) {
    const int64_t other = at.has(i) ? at.neighbour(i) : at.n;
    squares[i] = 0;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const A apart = A(colours[c * count + at.n]) - A(colours[c * count + other]);
      squares[i] += apart * apart;
    }
  }
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kAround; ++i) {
    const A distance = sqrt(squares[i]);
    sum += at.has(i) ? distance : A(0);
  }
  return sum / A(at.neighbours());
}

}  // namespace arr_coc
