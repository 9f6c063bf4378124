#include <torch/csrc/stable/library.h>

#include "arr_coc/common/image_columns.cuh"
#include "arr_coc/texture_statistics/texture_statistics.h"

namespace arr_coc {
namespace {

// A patch is summed in units of a few rows. One thread sums a unit for n columns, or for both halves of n columns that
// two patches share. Then units and columns are added in one order, however the units are distributed, so a sample's
// sums do not depend on its batch. A block takes a part of a row of patches. Its threads' y distributes the units if
// that fills the machine.
constexpr int kThreads = 256;
constexpr int kUnitRows = 4, kUnits = 8;  // a unit has at least so many rows, a patch at most so many units
constexpr int kSums = 4;                  // f(Y), f(X) - f(Y), f(Y) - f(Z), the gradient's magnitude
constexpr int64_t kSharedBytes = 48 << 10;

struct Layout {
  int64_t patch_size, columns;  // of an image in patches
  int unit_rows, units, units_per_thread, patches_per_block;
};

__device__ __forceinline__ float magnitude_of(float gx, float gy) {
  const float square = fmaf(gx, gx, fmaf(gy, gy, float(kMagnitudeFloor)));
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(square));
  return root;
}
__device__ __forceinline__ double magnitude_of(double gx, double gy) {
  return sqrt(gx * gx + gy * gy + kMagnitudeFloor);
}

// Adds n neighbouring values to their m sums.
template <int n, int m, class A>
__device__ __forceinline__ void add(A (&sums)[m], const A (&values)[n]) {
#pragma unroll
  for (int part = 0; part < m; ++part) {
    A sum = values[part * (n / m)];
    if constexpr (n / m == 2) sum += values[part * 2 + 1];
    if constexpr (n / m == 4) sum = (sum + values[1]) + (values[2] + values[3]);
    sums[part] += sum;
  }
}

template <class T, int n, int m>
__global__ void __launch_bounds__(kThreads, sizeof(accumulate_t<T>) == 4 ? 2 : 1)
    statistics_kernel(const T* __restrict__ rgb, T* __restrict__ colours, T* __restrict__ edges, int64_t height,
                      int64_t width, Layout layout, Origin origin) {
  using A = accumulate_t<T>;
  constexpr int kBody = n == 1 ? 1 : 2;  // rows of one turn; a unit has no part of one
  extern __shared__ double shared[];
  A* const sums = reinterpret_cast<A*>(shared);  // [kSums][units][blockDim.x][m]
  const int64_t sample = origin.sample + blockIdx.z, row = origin.row + blockIdx.y;
  const int64_t first_patch = int64_t(blockIdx.x) * layout.patches_per_block;
  const int patches = int(min(int64_t(layout.patches_per_block), layout.columns - first_patch));
  const int64_t span = patches * layout.patch_size / n;  // threads' columns
  const T* image = rgb + sample * 3 * height * width;
  const int first_unit = threadIdx.y * layout.units_per_thread;
  const int begin = first_unit * layout.unit_rows;
  const int end = int(min(begin + int64_t(layout.units_per_thread) * layout.unit_rows, layout.patch_size));

  if (begin < end) {
    // One turn, unless a patch is wider than the block.
    for (int64_t k = threadIdx.x; k < (span + kWarpSize - 1) / kWarpSize * kWarpSize; k += blockDim.x) {
      const auto put = [&](int which, int unit, A(&values)[m], bool counts) {
        A* sum = sums + ((which * layout.units + unit) * int(blockDim.x) + int(threadIdx.x)) * m;
#pragma unroll
        for (int part = 0; part < m; ++part) {
          if (counts && k < blockDim.x) {
            sum[part] = values[part];
          } else if (counts && k < span) {
            sum[part] += values[part];
          }
          values[part] = 0;
        }
      };
      ImageColumns<T, n> strip(image, height, width, first_patch * layout.patch_size + k * n,
                               row * layout.patch_size + begin);
      Slopes<A, n> at = strip.slopes(strip.load_above()), up = at;
      PixelRow<T, n> pixels = strip.load_next();
      A sum[kSums][m] = {};
      // The row above the one that has come: its stencil is complete.
      const auto add_magnitudes = [&] {
        const Slopes<A, n> down = strip.slopes(pixels);
        A magnitudes[n];
#pragma unroll
        for (int i = 0; i < n; ++i) magnitudes[i] = magnitude_of(sobel_x(up, at, down, i), sobel_y(up, down, i));
        add(sum[3], magnitudes);
        up = at;
        at = down;
      };
      for (int unit = first_unit, y = begin; y < end; ++unit) {
        const int unit_end = min(y + layout.unit_rows, end);
        for (bool fresh = true; y < unit_end; y += kBody, fresh = false) {
#pragma unroll
          for (int i = 0; i < kBody; ++i) {
            const PixelRow<T, n> next = strip.load_next();
            add_magnitudes();
            if (i == 0 && fresh) put(3, unit - 1, sum[3], unit > first_unit);
            A colour[3][n];
#pragma unroll
            for (int k = 0; k < n; ++k) {
              const Triple<A> pixel =
                  opponents_of<CudaCurves<A>>(A(pixels.r.values[k]), A(pixels.g.values[k]), A(pixels.b.values[k]));
              colour[0][k] = pixel.first;
              colour[1][k] = pixel.second;
              colour[2][k] = pixel.third;
            }
#pragma unroll
            for (int which = 0; which < 3; ++which) add(sum[which], colour[which]);
            pixels = next;
          }
        }
#pragma unroll
        for (int which = 0; which < 3; ++which) put(which, unit, sum[which], true);
      }
      add_magnitudes();
      put(3, (end - 1) / layout.unit_rows, sum[3], true);
    }
  }

  __syncthreads();
  const int parts = int(min(layout.patch_size / (n / m), int64_t(blockDim.x)));  // of a patch
  const int64_t rows = height / layout.patch_size, image_patches = rows * layout.columns;
  const A pixels = A(layout.patch_size) * A(layout.patch_size);
  for (int item = threadIdx.y * blockDim.x + threadIdx.x; item < kSums * patches; item += blockDim.x * blockDim.y) {
    const int which = item / patches, patch = item % patches;
    A sum = 0;
    for (int part = patch * parts; part < (patch + 1) * parts; ++part)
      for (int unit = 0; unit < layout.units; ++unit)
        sum += sums[(which * layout.units + unit) * int(blockDim.x) * m + part];
    const A mean = sum / pixels;
    const Triple<A> lab = scaled_to_lab(Triple<A>{mean, mean, mean});
    T* plane = which < 3 ? colours + (sample * 3 + which) * image_patches : edges + sample * image_patches;
    plane[row * layout.columns + first_patch + patch] = T(which == 0   ? lab.first
                                                          : which == 1 ? lab.second
                                                          : which == 2 ? lab.third
                                                                       : mean);
  }
}

template <class T, int n, int m>
void launch(const TextureStatistics<T>& call, const Cuda& device) {
  const auto [rgb, colours, edges, batch, height, width, patch_size] = call;
  const int64_t rows = height / patch_size, columns = width / patch_size;
  Layout layout;
  layout.patch_size = patch_size;
  layout.columns = columns;
  layout.unit_rows = int(std::max<int64_t>(kUnitRows, 2 * ceil_div(patch_size, 2 * kUnits)));
  layout.units = int(ceil_div(patch_size, layout.unit_rows));
  // Groups of threads that share out a patch's rows: as many as the units where the machine would not be full.
  const int64_t sums = kSums * layout.units * m * sizeof(accumulate_t<T>);  // bytes a thread
  int64_t threads = kThreads;
  while (threads * sums > kSharedBytes) threads /= 2;
  const int64_t together = m;  // patches that fill whole threads' columns
  int64_t groups = 1, blocks = 0;
  for (;; groups *= 2) {
    const int64_t most = std::max<int64_t>(1, threads / groups * n / (together * patch_size)) * together;
    blocks = ceil_div(columns, most);
    if (blocks * rows * batch >= 1024 || groups * 2 > layout.units || threads / (groups * 2) < 2 * kWarpSize) break;
    // A patch wider than a group takes several turns, which is another order of sums.
    if (threads / (groups * 2) * n < patch_size) break;
  }
  layout.patches_per_block = int(ceil_div(ceil_div(columns, blocks), together) * together);
  layout.units_per_thread = int(ceil_div(layout.units, groups));
  const int64_t span = layout.patches_per_block * patch_size / n;
  const dim3 block(unsigned(std::min(threads / groups, ceil_div(span, kWarpSize) * kWarpSize)), unsigned(groups));
  const unsigned across = unsigned(ceil_div(columns, layout.patches_per_block));
  for_each_grid(batch, rows, 1, across, [&](dim3 grid, Origin origin) {
    device.launch(statistics_kernel<T, n, m>, {grid, block, size_t(block.x * sums)}, call.rgb, call.colours, call.edges,
                  call.height, call.width, layout, origin);
  });
}

}  // namespace

template <class T>
void run(const Cuda& device, const TextureStatistics<T>& call) {
  // Two patches whose columns fill whole vectors, where one does not, still fit a block's threads.
  const bool vector = packs<4>(call.rgb, call.width);
  const int64_t patch = call.patch_size;
  const auto start = vector && patch % 4 == 0                           ? &launch<T, 4, 1>
                     : vector && patch % 2 == 0 && patch < 96           ? &launch<T, 4, 2>
                     : patch % 2 == 0 && packs<2>(call.rgb, call.width) ? &launch<T, 2, 1>
                                                                        : &launch<T, 1, 1>;
  start(call, device);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("texture_statistics", TORCH_BOX(&texture_statistics<Cuda>)); }

}  // namespace arr_coc
