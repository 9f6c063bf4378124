#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/image_columns.cuh"
#include "ops/texture_statistics/texture_statistics.h"

namespace arr_coc {
namespace {

// A patch is summed in units of a few rows, each by one thread for n columns, and then unit by unit and column by
// column: in one order however the units are shared out, so that a sample's sums do not depend on its batch. A block
// takes a stretch of a row of patches; its threads' y divides the units between them where that fills the machine.
constexpr int kThreads = 256;
constexpr int kUnitRows = 4, kUnits = 8;  // a unit has at least so many rows, a patch at most so many units
constexpr int kSums = 4;                  // f(Y), f(X) - f(Y), f(Y) - f(Z), the gradient's magnitude
constexpr int64_t kGridLimit = 65535;     // of a grid's y and z

struct Layout {
  int64_t patch_size, columns;  // of an image in patches
  int64_t unit_rows;
  int units, units_per_thread, patches_per_block;
};

// Where a grid's first block is.
struct Origin {
  int64_t sample, row;
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

template <class A, int n>
__device__ __forceinline__ A sum_of(const A (&values)[n]) {
  if constexpr (n == 4) {
    return (values[0] + values[1]) + (values[2] + values[3]);
  } else if constexpr (n == 2) {
    return values[0] + values[1];
  } else {
    return values[0];
  }
}

template <class T, int n>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const T* __restrict__ rgb, T* __restrict__ colours, T* __restrict__ edges, int64_t height,
                      int64_t width, Layout layout, Origin origin) {
  using A = accumulate_t<T>;
  extern __shared__ double shared[];
  A* const sums = reinterpret_cast<A*>(shared);  // [kSums][units][blockDim.x]
  const int64_t sample = origin.sample + blockIdx.z, row = origin.row + blockIdx.y;
  const int64_t first_patch = int64_t(blockIdx.x) * layout.patches_per_block, per_patch = layout.patch_size / n;
  const int patches = int(min(int64_t(layout.patches_per_block), layout.columns - first_patch));
  const int64_t span = patches * per_patch;  // threads' columns
  const T* image = rgb + sample * 3 * height * width;
  const int first_unit = threadIdx.y * layout.units_per_thread;
  const int64_t begin = first_unit * layout.unit_rows;
  const int64_t end = min(begin + layout.units_per_thread * layout.unit_rows, layout.patch_size);

  if (begin < end) {
    // One turn, unless a patch is wider than the block.
    for (int64_t k = threadIdx.x; k < (span + kWarpSize - 1) / kWarpSize * kWarpSize; k += blockDim.x) {
      const auto put = [&](int which, int unit, A value) {
        A& sum = sums[(which * layout.units + unit) * int(blockDim.x) + int(threadIdx.x)];
        if (k < blockDim.x) {
          sum = value;
        } else if (k < span) {
          sum += value;
        }
      };
      ImageColumns<T, n> strip(image, height, width, first_patch * layout.patch_size + k * n,
                               row * layout.patch_size + begin);
      Slopes<A, n> up = strip.slopes(strip.load()), at = up;
      PixelRow<T, n> pixels = strip.load();
      A sum[kSums] = {0, 0, 0, 0};
      int unit = first_unit;
      int64_t left = layout.unit_rows;  // rows of the unit whose colours are still to be added
      for (int64_t y = begin; y <= end; ++y) {
        const PixelRow<T, n> next = strip.load();
        const Slopes<A, n> down = strip.slopes(pixels);
        if (y > begin) {  // the row above this one: its stencil is complete
          A magnitudes[n];
#pragma unroll
          for (int i = 0; i < n; ++i) magnitudes[i] = magnitude_of(sobel_x(up, at, down, i), sobel_y(up, down, i));
          sum[3] += sum_of(magnitudes);
          up = at;
          if (left == 0 || y == end) {
            for (int which = 0; which < kSums; ++which) put(which, unit, sum[which]), sum[which] = 0;
            ++unit;
            left = layout.unit_rows;
          }
        }
        if (y == end) break;
        at = down;
        A colour[3][n];
#pragma unroll
        for (int i = 0; i < n; ++i) {
          const Triple<A> pixel =
              opponents_of<CudaCurves<A>>(A(pixels.r.values[i]), A(pixels.g.values[i]), A(pixels.b.values[i]));
          colour[0][i] = pixel.first;
          colour[1][i] = pixel.second;
          colour[2][i] = pixel.third;
        }
        for (int which = 0; which < 3; ++which) sum[which] += sum_of(colour[which]);
        --left;
        pixels = next;
      }
    }
  }

  __syncthreads();
  const int parts = int(min(per_patch, int64_t(blockDim.x)));
  const int64_t rows = height / layout.patch_size, image_patches = rows * layout.columns;
  const A pixels = A(layout.patch_size) * A(layout.patch_size);
  for (int patch = threadIdx.y * blockDim.x + threadIdx.x; patch < patches; patch += blockDim.x * blockDim.y) {
    A mean[kSums];
    for (int which = 0; which < kSums; ++which) {
      A sum = 0;
      for (int part = patch * parts; part < (patch + 1) * parts; ++part)
        for (int unit = 0; unit < layout.units; ++unit)
          sum += sums[(which * layout.units + unit) * int(blockDim.x) + part];
      mean[which] = sum / pixels;
    }
    const Triple<A> lab = scaled_to_lab(Triple<A>{mean[0], mean[1], mean[2]});
    const int64_t at = row * layout.columns + first_patch + patch;
    T* colour = colours + sample * 3 * image_patches + at;
    colour[0] = T(lab.first);
    colour[image_patches] = T(lab.second);
    colour[2 * image_patches] = T(lab.third);
    edges[sample * image_patches + at] = T(mean[3]);
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T, int n>
void launch(const T* rgb, T* colours, T* edges, int64_t batch, int64_t height, int64_t width, int64_t patch_size,
            cudaStream_t stream) {
  Layout layout;
  layout.patch_size = patch_size;
  layout.columns = width / patch_size;
  layout.unit_rows = std::max<int64_t>(kUnitRows, ceil_div(patch_size, kUnits));
  layout.units = int(ceil_div(patch_size, layout.unit_rows));
  const int64_t rows = height / patch_size, per_patch = patch_size / n;
  // Groups of threads that share out a patch's rows: as many as the units where the machine would not be full.
  int64_t groups = 1, blocks = 0;
  const int threads = sizeof(T) == 8 ? kThreads / 2 : kThreads;  // what 48 KB of sums are enough for
  for (;; groups *= 2) {
    const int64_t most = std::max<int64_t>(1, threads / groups / per_patch);
    blocks = ceil_div(layout.columns, most);
    if (blocks * rows * batch >= 1024 || groups * 2 > layout.units || threads / (groups * 2) < kWarpSize) break;
  }
  layout.patches_per_block = int(ceil_div(layout.columns, blocks));
  layout.units_per_thread = int(ceil_div(layout.units, groups));
  const int64_t span = layout.patches_per_block * per_patch;
  const dim3 block(unsigned(std::min(threads / groups, ceil_div(span, kWarpSize) * kWarpSize)), unsigned(groups));
  const size_t shared = kSums * layout.units * block.x * sizeof(accumulate_t<T>);
  for (int64_t sample = 0; sample < batch; sample += kGridLimit) {
    for (int64_t row = 0; row < rows; row += kGridLimit) {
      const dim3 grid(unsigned(ceil_div(layout.columns, layout.patches_per_block)),
                      grid_size(rows - row, 1, kGridLimit), grid_size(batch - sample, 1, kGridLimit));
      statistics_kernel<T, n>
          <<<grid, block, shared, stream>>>(rgb, colours, edges, height, width, layout, Origin{sample, row});
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
}

std::tuple<Tensor, Tensor> texture_statistics_cuda(const Tensor& rgb, int64_t patch_size) {
  check_texture_statistics(rgb, patch_size);
  const CudaScope scope(rgb);
  const Tensor in = torch::stable::contiguous(rgb);
  const int64_t batch = in.size(0), height = in.size(2), width = in.size(3);
  const int64_t rows = height / patch_size, columns = width / patch_size;
  Tensor colours = torch::stable::new_empty(in, {batch, 3, rows, columns});
  Tensor edges = torch::stable::new_empty(in, {batch, 1, rows, columns});
  if (in.numel() == 0) return {colours, edges};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* pixels = static_cast<const T*>(in.const_data_ptr());
    T *colour = static_cast<T*>(colours.mutable_data_ptr()), *edge = static_cast<T*>(edges.mutable_data_ptr());
    const auto run = patch_size % 4 == 0 && packs<4>(pixels, width)   ? &launch<T, 4>
                     : patch_size % 2 == 0 && packs<2>(pixels, width) ? &launch<T, 2>
                                                                      : &launch<T, 1>;
    run(pixels, colour, edge, batch, height, width, patch_size, scope.stream());
  });
  return {colours, edges};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("texture_statistics", TORCH_BOX(&texture_statistics_cuda)); }

}  // namespace arr_coc
