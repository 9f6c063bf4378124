#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/colour.cuh"
#include "common/cuda.cuh"
#include "ops/fused_texture/fused_texture.h"

namespace arr_coc {
namespace {

// A block computes a tile of 128 x 8 pixels, a warp a row of it, a thread four pixels. What the 3 x 3 stencils read is
// in shared memory, with one row or column more on every side. Those rows are read again by the tiles beside, out of
// L2.
constexpr int kThreadPixels = 4;
constexpr int kTileWidth = kWarpSize * kThreadPixels, kTileHeight = 8;
constexpr int kMargin = kThreadPixels;  // columns before the tile's first: one is used, four keep vectors aligned
constexpr int64_t kGridLimit = 65535;   // of a grid's y and z
constexpr int64_t kWideGridLimit = (int64_t(1) << 31) - 1;  // of its x

template <class A>
struct alignas(16) Tile {
  A values[kTileHeight + 2][kMargin + kTileWidth + kMargin];
  // Rows and columns -1 .. kTileHeight and -1 .. kTileWidth.
  __device__ A* at(int row, int column) { return &values[row + 1][kMargin + column]; }
};

template <class T, int n>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Pack {
  T values[n];
};

// Whether rows of `size` values, the first at `pointer`, start where a Pack may. True for every sample of a batch or
// for none, so that all of them take one path.
template <int n, class T>
bool packs(const T* pointer, int64_t size) {
  return size % n == 0 && reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T, n>) == 0;
}

// The tile column of a thread's pixel i. With kVector its pixels are neighbours and move as one vector; where rows are
// not aligned for that they are 32 apart, so that the warp's are neighbours.
template <bool kVector>
__device__ __forceinline__ int column_of(int i) {
  return kVector ? threadIdx.x * kThreadPixels + i : threadIdx.x + i * kWarpSize;
}

// This thread's pixels of an image row, from the tile's first column x0 on; columns past the end repeat the last.
template <bool kVector, class T, class A>
__device__ __forceinline__ void load_row(const T* row, int64_t x0, int64_t width, A (&out)[kThreadPixels]) {
  if (kVector && x0 + column_of<kVector>(0) < width) {
    const auto pack = *reinterpret_cast<const Pack<T, kThreadPixels>*>(row + x0 + column_of<kVector>(0));
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) out[i] = A(pack.values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) out[i] = A(row[min(x0 + column_of<kVector>(i), width - 1)]);
  }
}

template <bool kVector, class T, class A>
__device__ __forceinline__ void store_row(T* row, int64_t x0, int64_t width, const A (&in)[kThreadPixels]) {
  if (kVector) {
    if (x0 + column_of<kVector>(0) >= width) return;
    Pack<T, kThreadPixels> pack;
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) pack.values[i] = T(in[i]);
    *reinterpret_cast<Pack<T, kThreadPixels>*>(row + x0 + column_of<kVector>(0)) = pack;
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

// The values left of, at and right of each of this thread's pixels.
template <bool kVector, class A>
__device__ __forceinline__ void get_row(Tile<A>& tile, int row, A (&out)[kThreadPixels][3]) {
  if (kVector) {
    const A* first = tile.at(row, column_of<kVector>(0));
    const auto pack = *reinterpret_cast<const Pack<A, kThreadPixels>*>(first);
    const A left = first[-1], right = first[kThreadPixels];
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) {
      out[i][0] = i > 0 ? pack.values[i > 0 ? i - 1 : 0] : left;
      out[i][1] = pack.values[i];
      out[i][2] = i + 1 < kThreadPixels ? pack.values[i + 1 < kThreadPixels ? i + 1 : 0] : right;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i)
#pragma unroll
      for (int j = 0; j < 3; ++j) out[i][j] = tile.at(row, column_of<kVector>(i))[j - 1];
  }
}

// Shares out the ring around the tile: row(r) for rows -1 and kTileHeight goes to a warp each, cell(r, c) for the
// columns -1 and kTileWidth to the lanes of a third.
template <class Row, class Cell>
__device__ __forceinline__ void fill_ring(const Row& row, const Cell& cell) {
  constexpr int kHeight = kTileHeight + 2;
  if (threadIdx.y == 0) row(-1);
  if (threadIdx.y == 1) row(kTileHeight);
  if (threadIdx.y == 2 && threadIdx.x < 2 * kHeight)
    cell(int(threadIdx.x) % kHeight - 1, threadIdx.x < kHeight ? -1 : kTileWidth);
}

__device__ __forceinline__ int64_t clamped(int64_t index, int64_t size) {
  return min(max(index, int64_t(0)), size - 1);
}

// Where a grid's first tile is.
struct Origin {
  int64_t sample, row;
};

// Calls launch(grid, origin) for grids that cover the batch, a block a tile. One grid does for fewer than 65536 samples
// of fewer than 524281 rows; further grids, not loops in the kernels, take the rest, because loops cost registers.
template <class F>
void for_each_grid(int64_t batch, int64_t height, int64_t width, const F& launch) {
  for (int64_t sample = 0; sample < batch; sample += kGridLimit) {
    for (int64_t row = 0; row < height; row += kGridLimit * kTileHeight) {
      const dim3 grid(grid_size(width, kTileWidth, kWideGridLimit), grid_size(height - row, kTileHeight, kGridLimit),
                      grid_size(batch - sample, 1, kGridLimit));
      launch(grid, Origin{sample, row});
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
}

const dim3 kBlock(kWarpSize, kTileHeight);

// Five blocks a multiprocessor (48 registers a thread) keep enough loads under way; six spill.
#define ARR_COC_TILE_BOUNDS __launch_bounds__(kWarpSize* kTileHeight, sizeof(accumulate_t<T>) == 4 ? 5 : 1)

template <class T, bool kVector>
__global__ void ARR_COC_TILE_BOUNDS texture_kernel(const T* __restrict__ rgb, T* __restrict__ lab,
                                                   T* __restrict__ sobel_x, T* __restrict__ sobel_y, int64_t height,
                                                   int64_t width, Origin origin) {
  using A = accumulate_t<T>;
  using Curves = CudaCurves<A>;
  __shared__ Tile<A> luma;
  const int64_t plane = height * width, sample = origin.sample + blockIdx.z;
  const int64_t y0 = origin.row + int64_t(blockIdx.y) * kTileHeight, x0 = int64_t(blockIdx.x) * kTileWidth;
  const T* image = rgb + sample * 3 * plane;
  const auto load = [&](int64_t y, A(&r)[kThreadPixels], A(&g)[kThreadPixels], A(&b)[kThreadPixels]) {
    const T* row = image + clamped(y, height) * width;
    load_row<kVector>(row, x0, width, r);
    load_row<kVector>(row + plane, x0, width, g);
    load_row<kVector>(row + 2 * plane, x0, width, b);
  };
  const auto put_luma = [&](int row, const A(&r)[kThreadPixels], const A(&g)[kThreadPixels],
                            const A(&b)[kThreadPixels]) {
    A grey[kThreadPixels];
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) grey[i] = luma_of<Curves>(r[i], g[i], b[i]);
    put_row<kVector>(luma, row, grey);
  };

  const int ty = threadIdx.y;
  const int64_t y = y0 + ty;
  A r[kThreadPixels], g[kThreadPixels], b[kThreadPixels];
  load(y, r, g, b);
  put_luma(ty, r, g, b);
  fill_ring(
      [&](int row) {
        A ring_r[kThreadPixels], ring_g[kThreadPixels], ring_b[kThreadPixels];
        load(y0 + row, ring_r, ring_g, ring_b);
        put_luma(row, ring_r, ring_g, ring_b);
      },
      [&](int row, int column) {
        const T* pixel = image + clamped(y0 + row, height) * width + clamped(x0 + column, width);
        *luma.at(row, column) = luma_of<Curves>(A(pixel[0]), A(pixel[plane]), A(pixel[2 * plane]));
      });

  // LAB goes before the barrier: its arithmetic covers the wait for the ring.
  const int64_t at = y * width;
  if (y < height) {
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) {
      const Triple<A> pixel = lab_of<Curves>(r[i], g[i], b[i]);
      r[i] = pixel.first;
      g[i] = pixel.second;
      b[i] = pixel.third;
    }
    T* row = lab + sample * 3 * plane + at;
    store_row<kVector>(row, x0, width, r);
    store_row<kVector>(row + plane, x0, width, g);
    store_row<kVector>(row + 2 * plane, x0, width, b);
  }

  __syncthreads();
  if (y >= height) return;
  A up[kThreadPixels][3], mid[kThreadPixels][3], down[kThreadPixels][3], gx[kThreadPixels], gy[kThreadPixels];
  get_row<kVector>(luma, ty - 1, up);
  get_row<kVector>(luma, ty, mid);
  get_row<kVector>(luma, ty + 1, down);
#pragma unroll
  for (int i = 0; i < kThreadPixels; ++i) {
    gx[i] = ((up[i][2] - up[i][0]) + A(2) * (mid[i][2] - mid[i][0]) + (down[i][2] - down[i][0])) * A(0.125);
    gy[i] = ((down[i][0] - up[i][0]) + A(2) * (down[i][1] - up[i][1]) + (down[i][2] - up[i][2])) * A(0.125);
  }
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
  const auto fill_row = [&](int row) {
    const int64_t at = offset + clamped(y0 + row, height) * width;
    A gx[kThreadPixels], gy[kThreadPixels];
    load_row<kVector>(grad_x + at, x0, width, gx);
    load_row<kVector>(grad_y + at, x0, width, gy);
#pragma unroll
    for (int i = 0; i < kThreadPixels; ++i) {
      if (outside(x0 + column_of<kVector>(i), width)) gx[i] = -gx[i];
      if (outside(y0 + row, height)) gy[i] = -gy[i];
    }
    put_row<kVector>(x_tile, row, gx);
    put_row<kVector>(y_tile, row, gy);
  };
  const int ty = threadIdx.y;
  const int64_t y = y0 + ty;
  fill_row(ty);
  fill_ring(fill_row, [&](int row, int column) {
    const int64_t at = offset + clamped(y0 + row, height) * width + clamped(x0 + column, width);
    const A gx = A(grad_x[at]), gy = A(grad_y[at]);
    *x_tile.at(row, column) = outside(x0 + column, width) ? -gx : gx;
    *y_tile.at(row, column) = outside(y0 + row, height) ? -gy : gy;
  });

  __syncthreads();
  if (y >= height) return;
  A up[kThreadPixels][3], mid[kThreadPixels][3], down[kThreadPixels][3], sum[kThreadPixels];
  get_row<kVector>(x_tile, ty - 1, up);
  get_row<kVector>(x_tile, ty, mid);
  get_row<kVector>(x_tile, ty + 1, down);
#pragma unroll
  for (int i = 0; i < kThreadPixels; ++i)
    sum[i] = (up[i][0] - up[i][2]) + A(2) * (mid[i][0] - mid[i][2]) + (down[i][0] - down[i][2]);
  get_row<kVector>(y_tile, ty - 1, up);
  get_row<kVector>(y_tile, ty + 1, down);
#pragma unroll
  for (int i = 0; i < kThreadPixels; ++i) {
    sum[i] += (up[i][0] + A(2) * up[i][1] + up[i][2]) - (down[i][0] + A(2) * down[i][1] + down[i][2]);
    sum[i] *= A(0.125);
  }
  store_row<kVector>(out + offset + y * width, x0, width, sum);
}

constexpr int kGradThreads = 256;

// n neighbouring pixels a thread; n divides the plane.
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
      for (int c = 0; c < 3; ++c) *reinterpret_cast<P*>(out + at + c * plane) = grad[c];
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> fused_texture_cuda(const Tensor& rgb) {
  check_fused_texture(rgb);
  const CudaScope scope(rgb);
  const Tensor in = torch::stable::contiguous(rgb);
  const int64_t batch = in.size(0), height = in.size(2), width = in.size(3);
  Tensor lab = torch::stable::new_empty(in, {batch, 3, height, width});
  Tensor sobel_x = torch::stable::new_empty(in, {batch, 1, height, width});
  Tensor sobel_y = torch::stable::new_empty(in, {batch, 1, height, width});
  if (in.numel() == 0) return {lab, sobel_x, sobel_y};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* pixels = static_cast<const T*>(in.const_data_ptr());
    const auto kernel = packs<kThreadPixels>(pixels, width) ? &texture_kernel<T, true> : &texture_kernel<T, false>;
    for_each_grid(batch, height, width, [&](dim3 grid, Origin origin) {
      kernel<<<grid, kBlock, 0, scope.stream()>>>(pixels, static_cast<T*>(lab.mutable_data_ptr()),
                                                  static_cast<T*>(sobel_x.mutable_data_ptr()),
                                                  static_cast<T*>(sobel_y.mutable_data_ptr()), height, width, origin);
    });
  });
  return {lab, sobel_x, sobel_y};
}

Tensor lab_to_rgb_grad_cuda(const Tensor& rgb, const Tensor& grad_lab, const std::optional<Tensor>& grad_luma) {
  check_lab_to_rgb_grad(rgb, grad_lab, grad_luma);
  const CudaScope scope(rgb);
  const Tensor in = torch::stable::contiguous(rgb), upstream = torch::stable::contiguous(grad_lab);
  const std::optional<Tensor> luma = contiguous(grad_luma);
  const int64_t batch = in.size(0), plane = in.size(2) * in.size(3);
  Tensor grad = torch::stable::new_empty(in, {batch, 3, in.size(2), in.size(3)});
  if (in.numel() == 0) return grad;
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    constexpr int n = 16 / sizeof(T);
    const T *pixels = static_cast<const T*>(in.const_data_ptr()), *g = static_cast<const T*>(upstream.const_data_ptr());
    const T* g_luma = data_or_null<T>(luma);
    const bool vector = packs<n>(pixels, plane) && packs<n>(g, plane) && packs<n>(g_luma, plane);
    const auto kernel = vector ? &lab_to_rgb_grad_kernel<T, n> : &lab_to_rgb_grad_kernel<T, 1>;
    const dim3 grid(grid_size(plane, kGradThreads * (vector ? n : 1)), grid_size(batch, 1, kGridLimit));
    kernel<<<grid, kGradThreads, 0, scope.stream()>>>(pixels, g, g_luma, static_cast<T*>(grad.mutable_data_ptr()),
                                                      batch, plane);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return grad;
}

Tensor sobel_grad_cuda(const Tensor& grad_x, const Tensor& grad_y) {
  check_sobel_grad(grad_x, grad_y);
  const CudaScope scope(grad_x);
  const Tensor gx = torch::stable::contiguous(grad_x), gy = torch::stable::contiguous(grad_y);
  const int64_t batch = gx.size(0), height = gx.size(2), width = gx.size(3);
  Tensor grad_luma = torch::stable::new_empty(gx, {batch, 1, height, width});
  if (gx.numel() == 0) return grad_luma;
  dispatch_floating(gx.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T *x = static_cast<const T*>(gx.const_data_ptr()), *y = static_cast<const T*>(gy.const_data_ptr());
    const auto kernel = packs<kThreadPixels>(x, width) && packs<kThreadPixels>(y, width) ? &sobel_grad_kernel<T, true>
                                                                                         : &sobel_grad_kernel<T, false>;
    for_each_grid(batch, height, width, [&](dim3 grid, Origin origin) {
      kernel<<<grid, kBlock, 0, scope.stream()>>>(x, y, static_cast<T*>(grad_luma.mutable_data_ptr()), height, width,
                                                  origin);
    });
  });
  return grad_luma;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("fused_texture", TORCH_BOX(&fused_texture_cuda));
  m.impl("lab_to_rgb_grad", TORCH_BOX(&lab_to_rgb_grad_cuda));
  m.impl("sobel_grad", TORCH_BOX(&sobel_grad_cuda));
}

}  // namespace arr_coc
