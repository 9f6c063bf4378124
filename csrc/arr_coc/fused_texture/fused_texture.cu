#include <torch/csrc/stable/library.h>

#include "arr_coc/common/image_columns.cuh"
#include "arr_coc/fused_texture/fused_texture.h"

namespace arr_coc {
namespace {

// A block computes a tile of 256 x 4 pixels, a thread four pixels of a row. The 3 x 3 stencils read shared memory,
// which has one more row or column on every side. Additional warps load those rows, so that no warp loads and waits
// twice. They come from L2, where the tiles above and below left them; narrower and taller tiles are slower.
constexpr int kThreadPixels = 4, kRowThreads = 2 * kWarpSize;
constexpr int kTileWidth = kRowThreads * kThreadPixels, kTileHeight = 4;
constexpr int kMargin = kThreadPixels;  // columns before the tile's first: one is used, four keep vectors aligned

template <class A>
struct alignas(16) Tile {
  A values[kTileHeight + 2][kMargin + kTileWidth + kMargin];
  // Rows and columns -1 .. kTileHeight and -1 .. kTileWidth.
  __device__ A* at(int row, int column) { return &values[row + 1][kMargin + column]; }
};

// The tile column of a thread's pixel i. With kVector, its pixels are neighbours and move as one vector. If rows are
// not aligned for that, they are a row's threads apart, so that the warp's pixels are neighbours.
template <bool kVector>
__device__ __forceinline__ int column_of(int i) {
  return kVector ? threadIdx.x * kThreadPixels + i : threadIdx.x + i * kRowThreads;
}

// This thread's pixels of k image rows, from the tile's first column x0 on; columns past the end repeat the last.
template <bool kVector, int k, class T, class A>
__device__ __forceinline__ void load_rows(const T* const (&rows)[k], int64_t x0, int64_t width,
                                          A (&out)[k][kThreadPixels]) {
  const int64_t x = x0 + column_of<kVector>(0);
  if (kVector && x < width) {
    Pack<T, kThreadPixels> packs[k];
#pragma unroll
    for (int j = 0; j < k; ++j) packs[j] = *reinterpret_cast<const Pack<T, kThreadPixels>*>(rows[j] + x);
#pragma unroll
    for (int j = 0; j < k; ++j)
#pragma unroll
      for (int i = 0; i < kThreadPixels; ++i) out[j][i] = A(packs[j].values[i]);
  } else {
#pragma unroll
    for (int j = 0; j < k; ++j)
#pragma unroll
      for (int i = 0; i < kThreadPixels; ++i) out[j][i] = A(rows[j][min(x0 + column_of<kVector>(i), width - 1)]);
  }
}

template <bool kVector, class T, class A>
__device__ __forceinline__ void store_row(T* row, int64_t x0, int64_t width, const A (&in)[kThreadPixels]) {
  if (kVector) {
    if (x0 + column_of<kVector>(0) >= width) return;
    Pack<T, kThreadPixels> pack;
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) pack.values[i] = T(in[i]);
    store_pack(row + x0 + column_of<kVector>(0), pack);
  } else {
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i)
      if (x0 + column_of<kVector>(i) < width) row[x0 + column_of<kVector>(i)] = T(in[i]);
  }
}

template <bool kVector, class A>
__device__ __forceinline__ void put_row(Tile<A>& tile, int row, const A (&in)[kThreadPixels]) {
  if (kVector) {
    Pack<A, kThreadPixels> pack;
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) pack.values[i] = in[i];
    *reinterpret_cast<Pack<A, kThreadPixels>*>(tile.at(row, column_of<kVector>(0))) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) *tile.at(row, column_of<kVector>(i)) = in[i];
  }
}

// The two stencils' sums down a column: [1 2 1] in one tile, [-1 0 1] in the other.
template <class A>
struct Column {
  A smooth, step;
};

// [1 2 1] down and [-1 0 1] across of x_tile, [-1 0 1] down and [1 2 1] across of y_tile, both over 8.
template <bool kVector, class A>
__device__ __forceinline__ void stencils(Tile<A>& x_tile, Tile<A>& y_tile, int row, A (&x)[kThreadPixels],
                                         A (&y)[kThreadPixels]) {
  const auto column = [&](A x_up, A x_at, A x_down, A y_up, A y_down) {
    return Column<A>{CudaCurves<A>::multiply_add(A(2), x_at, x_up + x_down), y_down - y_up};
  };
  const auto column_at = [&](int c) {
    return column(*x_tile.at(row - 1, c), *x_tile.at(row, c), *x_tile.at(row + 1, c), *y_tile.at(row - 1, c),
                  *y_tile.at(row + 1, c));
  };
  const auto put = [&](int i, Column<A> left, Column<A> at, Column<A> right) {
    x[i] = (right.smooth - left.smooth) * A(0.125);
    y[i] = CudaCurves<A>::multiply_add(A(2), at.step, left.step + right.step) * A(0.125);
  };
  if constexpr (kVector) {
    const int first = column_of<true>(0);
    const auto pack = [&](Tile<A>& tile, int r) {
      return *reinterpret_cast<const Pack<A, kThreadPixels>*>(tile.at(r, first));
    };
    const auto x_up = pack(x_tile, row - 1), x_at = pack(x_tile, row), x_down = pack(x_tile, row + 1);
    const auto y_up = pack(y_tile, row - 1), y_down = pack(y_tile, row + 1);
    Column<A> columns[kThreadPixels + 2];
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i)
      columns[i + 1] = column(x_up.values[i], x_at.values[i], x_down.values[i], y_up.values[i], y_down.values[i]);
    // Columns beside come from neighbouring lanes: reads from shared memory, four apart, would conflict in its banks.
    const Column<A> before = columns[kThreadPixels], after = columns[1];
    columns[0] = {__shfl_up_sync(0xffffffffu, before.smooth, 1), __shfl_up_sync(0xffffffffu, before.step, 1)};
    columns[kThreadPixels + 1] = {__shfl_down_sync(0xffffffffu, after.smooth, 1),
                                  __shfl_down_sync(0xffffffffu, after.step, 1)};
    const int lane = threadIdx.x % kWarpSize;
    if (lane == 0) columns[0] = column_at(first - 1);
    if (lane == kWarpSize - 1) columns[kThreadPixels + 1] = column_at(first + kThreadPixels);
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) put(i, columns[i], columns[i + 1], columns[i + 2]);
  } else {
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) {
      const int c = column_of<false>(i);
      put(i, column_at(c - 1), column_at(c), column_at(c + 1));
    }
  }
}

__device__ __forceinline__ int64_t clamped(int64_t index, int64_t size) {
  return min(max(index, int64_t(0)), size - 1);
}

// The rows above and below the tile included.
const dim3 kBlock(kRowThreads, kTileHeight + 2);
#define ARR_COC_TILE_BOUNDS __launch_bounds__(kRowThreads*(kTileHeight + 2), sizeof(accumulate_t<T>) == 4 ? 4 : 1)

// A row's first and last thread also load the pixel beside the tile. This is its column; 0 for other threads.
__device__ __forceinline__ int end_column() {
  return threadIdx.x == 0 ? -1 : threadIdx.x == kRowThreads - 1 ? kTileWidth : 0;
}

template <class T, bool kVector>
__global__ void ARR_COC_TILE_BOUNDS texture_kernel(const T* __restrict__ rgb, T* __restrict__ lab,
                                                   T* __restrict__ sobel_x, T* __restrict__ sobel_y, int64_t height,
                                                   int64_t width, Origin origin) {
  using A = accumulate_t<T>;
  using Curves = CudaCurves<A>;
  __shared__ Tile<A> luma;
  const int64_t plane = height * width, sample = origin.sample + blockIdx.z;
  const int64_t y0 = origin.row + int64_t(blockIdx.y) * kTileHeight, x0 = int64_t(blockIdx.x) * kTileWidth;
  const int tile_row = int(threadIdx.y) - 1;
  const int64_t y = y0 + tile_row;
  const T* row = rgb + sample * 3 * plane + clamped(y, height) * width;
  const T* const rows[3] = {row, row + plane, row + 2 * plane};
  // All loads start before the first wait.
  const int end = end_column();
  T end_pixel[3];
  if (end != 0) {
#pragma unroll
    for (int c = 0; c < 3; ++c) end_pixel[c] = rows[c][clamped(x0 + end, width)];
  }
  A pixels[3][kThreadPixels], grey[kThreadPixels];
  load_rows<kVector>(rows, x0, width, pixels);
#pragma unroll
  for (int i = 0; i < kThreadPixels; ++i) grey[i] = luma_of<Curves>(pixels[0][i], pixels[1][i], pixels[2][i]);
  put_row<kVector>(luma, tile_row, grey);
  if (end != 0) *luma.at(tile_row, end) = luma_of<Curves>(A(end_pixel[0]), A(end_pixel[1]), A(end_pixel[2]));

  // LAB comes before the barrier, so that its arithmetic overlaps with the wait for the other warps.
  const bool inside = tile_row >= 0 && tile_row < kTileHeight && y < height;
  const int64_t at = y * width;
  if (inside) {
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) {
      const Triple<A> pixel = lab_of<Curves>(pixels[0][i], pixels[1][i], pixels[2][i]);
      pixels[0][i] = pixel.first;
      pixels[1][i] = pixel.second;
      pixels[2][i] = pixel.third;
    }
    T* out = lab + sample * 3 * plane + at;
    for (int c = 0; c < 3; ++c) store_row<kVector>(out + c * plane, x0, width, pixels[c]);
  }

  __syncthreads();
  if (!inside) return;
  A gx[kThreadPixels], gy[kThreadPixels];
  stencils<kVector>(luma, luma, tile_row, gx, gy);
  store_row<kVector>(sobel_x + sample * plane + at, x0, width, gx);
  store_row<kVector>(sobel_y + sample * plane + at, x0, width, gy);
}

// See fused_texture.cpp: beyond the image grad_x continues by its end row and by minus its end column, grad_y by minus
// its end row and by its end column.
template <class T, bool kVector>
__global__ void ARR_COC_TILE_BOUNDS sobel_grad_kernel(const T* __restrict__ grad_x, const T* __restrict__ grad_y,
                                                      T* __restrict__ out, int64_t height, int64_t width,
                                                      Origin origin) {
  using A = accumulate_t<T>;
  __shared__ Tile<A> x_tile, y_tile;
  const int64_t offset = (origin.sample + blockIdx.z) * height * width;
  const int64_t y0 = origin.row + int64_t(blockIdx.y) * kTileHeight, x0 = int64_t(blockIdx.x) * kTileWidth;
  const auto outside = [](int64_t index, int64_t size) { return index < 0 || index >= size; };
  const int tile_row = int(threadIdx.y) - 1;
  const int64_t y = y0 + tile_row, row = offset + clamped(y, height) * width;
  const T* const rows[2] = {grad_x + row, grad_y + row};
  const int end = end_column();
  T end_grad[2];
  if (end != 0) {
#pragma unroll
    for (int k = 0; k < 2; ++k) end_grad[k] = rows[k][clamped(x0 + end, width)];
  }
  A grads[2][kThreadPixels];
  load_rows<kVector>(rows, x0, width, grads);
#pragma unroll
  for (int i = 0; i < kThreadPixels; ++i) {
    if (outside(x0 + column_of<kVector>(i), width)) grads[0][i] = -grads[0][i];
    if (outside(y, height)) grads[1][i] = -grads[1][i];
  }
  put_row<kVector>(x_tile, tile_row, grads[0]);
  put_row<kVector>(y_tile, tile_row, grads[1]);
  if (end != 0) {
    *x_tile.at(tile_row, end) = outside(x0 + end, width) ? -A(end_grad[0]) : A(end_grad[0]);
    *y_tile.at(tile_row, end) = outside(y, height) ? -A(end_grad[1]) : A(end_grad[1]);
  }

  __syncthreads();
  if (tile_row < 0 || tile_row >= kTileHeight || y >= height) return;
  A from_x[kThreadPixels],
      from_y[kThreadPixels];  // except for the sign: across and down, the adjoint has the opposite direction
  stencils<kVector>(x_tile, y_tile, tile_row, from_x, from_y);
#pragma unroll
  for (int i = 0; i < kThreadPixels; ++i) from_x[i] = -(from_x[i] + from_y[i]);
  store_row<kVector>(out + offset + y * width, x0, width, from_x);
}

// Calls launch(grid, origin) for grids that cover the images, one block per tile.
template <class Call, class F>
void for_each_tile(const Call& call, const F& launch) {
  for_each_grid(call.batch, call.height, kTileHeight, grid_size(call.width, kTileWidth, INT32_MAX), launch);
}

constexpr int kGradThreads = 256;

// n neighbouring pixels per thread; n divides the plane.
template <class T, int n>
__global__ void __launch_bounds__(kGradThreads)
    lab_to_rgb_grad_kernel(const T* __restrict__ rgb, const T* __restrict__ grad_lab, const T* __restrict__ grad_luma,
                           T* __restrict__ out, int64_t batch, int64_t plane) {
  using A = accumulate_t<T>;
  using P = Pack<T, n>;
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    const int64_t step = int64_t(gridDim.x) * kGradThreads * n;
    for (int64_t p = (int64_t(blockIdx.x) * kGradThreads + threadIdx.x) * n; p < plane; p += step) {
      const int64_t at = b * 3 * plane + p;
      P colour[3], grad[3], luma;
      if (grad_luma) luma = *reinterpret_cast<const P*>(grad_luma + b * plane + p);
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        colour[c] = *reinterpret_cast<const P*>(rgb + at + c * plane);
        grad[c] = *reinterpret_cast<const P*>(grad_lab + at + c * plane);
      }
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const Triple<A> pixel =
            lab_gradient<CudaCurves<A>>(A(colour[0].values[i]), A(colour[1].values[i]), A(colour[2].values[i]),
                                        Triple<A>{A(grad[0].values[i]), A(grad[1].values[i]), A(grad[2].values[i])});
        const A from_luma = grad_luma ? A(luma.values[i]) : A(0);
        grad[0].values[i] = T(pixel.first + A(kLumaR) * from_luma);
        grad[1].values[i] = T(pixel.second + A(kLumaG) * from_luma);
        grad[2].values[i] = T(pixel.third + A(kLumaB) * from_luma);
      }
#pragma unroll
      for (int c = 0; c < 3; ++c) store_pack(out + at + c * plane, grad[c]);
    }
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const FusedTexture<T>& call) {
  const auto kernel = packs<kThreadPixels>(call.rgb, call.width) ? &texture_kernel<T, true> : &texture_kernel<T, false>;
  for_each_tile(call, [&](dim3 grid, Origin origin) {
    device.launch(kernel, {grid, kBlock}, call.rgb, call.lab, call.sobel_x, call.sobel_y, call.height, call.width,
                  origin);
  });
}

template <class T>
void run(const Cuda& device, const LabToRgbGrad<T>& call) {
  constexpr int n = 16 / sizeof(T);
  const int64_t plane = call.height * call.width;
  const bool vector = packs<n>(call.rgb, plane) && packs<n>(call.grad_lab, plane) && packs<n>(call.grad_luma, plane);
  const auto kernel = vector ? &lab_to_rgb_grad_kernel<T, n> : &lab_to_rgb_grad_kernel<T, 1>;
  const dim3 grid(grid_size(plane, kGradThreads * (vector ? n : 1)), grid_size(call.batch, 1, kGridLimit));
  device.launch(kernel, {grid, kGradThreads}, call.rgb, call.grad_lab, call.grad_luma, call.out, call.batch, plane);
}

template <class T>
void run(const Cuda& device, const SobelGrad<T>& call) {
  const bool vector = packs<kThreadPixels>(call.grad_x, call.width) && packs<kThreadPixels>(call.grad_y, call.width);
  const auto kernel = vector ? &sobel_grad_kernel<T, true> : &sobel_grad_kernel<T, false>;
  for_each_tile(call, [&](dim3 grid, Origin origin) {
    device.launch(kernel, {grid, kBlock}, call.grad_x, call.grad_y, call.out, call.height, call.width, origin);
  });
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("fused_texture", TORCH_BOX(&fused_texture<Cuda>));
  m.impl("lab_to_rgb_grad", TORCH_BOX(&lab_to_rgb_grad<Cuda>));
  m.impl("sobel_grad", TORCH_BOX(&sobel_grad<Cuda>));
}

}  // namespace arr_coc
