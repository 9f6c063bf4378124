// The gradients of compute_salience on CUDA. compute_salience.cpp has the formulas.
#pragma once

#include "arr_coc/common/column_units.cuh"
#include "arr_coc/compute_salience/compute_salience.h"
#include "arr_coc/compute_salience/patches.cuh"

namespace arr_coc {
namespace {

// How a patch's score changes with what it is made of, times the score's gradient.
template <class T>
struct Slopes {
  using A = accumulate_t<T>;
  const T* grad;
  const A* patches;
  PatchGrid grid;
  A edges, contrast, features;  // weights

  explicit Slopes(const SalienceGrad<T>& call)
      : grad(call.grad),
        patches(call.patches),
        grid(call.grid),
        edges(A(call.weights.edges)),
        contrast(A(call.weights.contrast)),
        features(A(call.weights.features)) {}

  __device__ __forceinline__ A upstream(int64_t sample, int64_t n) const { return A(grad[sample * grid.count() + n]); }

  // The sample's values of a statistic.
  __device__ __forceinline__ const A* statistic(int64_t which, int64_t sample) const {
    return patches + (sample * kStatistics + which) * grid.count();
  }

  // h / |f|.
  __device__ __forceinline__ A row(int64_t sample, int64_t n) const {
    return -upstream(sample, n) * features / 2 * inverse_norm(statistic(kNorms, sample)[n]);
  }

  // c / |f|.
  __device__ __forceinline__ A along(int64_t sample, int64_t n) const {
    const A norm = statistic(kNorms, sample)[n];
    return norm_passes(norm) * statistic(kCosines, sample)[n] * inverse_norm(norm);
  }

  // For each pixel's gradient magnitude.
  __device__ __forceinline__ A edge(int64_t sample, int64_t n) const {
    const A shifted = statistic(kEdges, sample)[n] + A(kEdgeHalf);
    return upstream(sample, n) * edges * A(kEdgeHalf) / (shifted * shifted) / pixels();
  }

  // For each distance to a neighbour, by pixel.
  __device__ __forceinline__ A distance(int64_t sample, const Place& at) const {
    const A shifted = statistic(kDistances, sample)[at.n] + A(kContrastHalf);
    return upstream(sample, at.n) * contrast * A(kContrastHalf) / (shifted * shifted) / A(at.neighbours()) / pixels();
  }

 private:
  __device__ __forceinline__ A pixels() const { return A(grid.patch * grid.patch); }
};

// A block takes a tile: patches side by side in a row of patches, and `height` of their rows of pixels.
struct Tiles {
  static constexpr int kMostPatches = 64;
  int patches, height;
  int64_t across, down, count;  // the tiles of a row of patches, of a patch, and of all samples

  // Tiles of 2048 pixels let a single image fill the device; in large batches larger ones wait less often.
  explicit Tiles(const PatchGrid& grid)
      : Tiles(grid, std::clamp<int64_t>(grid.batch * grid.plane / 4096, 2048, 16384)) {}

 private:
  Tiles(const PatchGrid& grid, int64_t pixels)
      : patches(int(
            std::clamp<int64_t>(pixels / (grid.patch * grid.patch), 1, std::min<int64_t>(kMostPatches, grid.columns)))),
        height(int(std::clamp<int64_t>(pixels / (grid.patch * patches), 1, grid.patch))),
        across((grid.columns + patches - 1) / patches),
        down((grid.patch + height - 1) / height),
        count(grid.batch * grid.rows * across * down) {}
};

template <class T>
struct GradientCall {
  using A = accumulate_t<T>;
  SalienceGrad<T> given;
  Slopes<T> slopes;
  Tiles tiles;
  ColumnCut cut;
  int64_t slabs, pixel_blocks, sum_blocks;  // of a row; of one launch
  A *partial, *shared;                      // [B, chunks, D], [B, D]
};

// What a tile's patches give to each of their pixels.
template <class A>
struct TileSlopes {
  A edges[Tiles::kMostPatches], colours[Tiles::kMostPatches][3];
  A towards[Tiles::kMostPatches][kAround][3];  // what each neighbour adds to `colours`
};

// The gradient of a colour is the sum over neighbours k of (slope_n + slope_k) (mu_n - mu_k) / |mu_n - mu_k|. Equal
// colours contribute nothing.
template <class T, class A = accumulate_t<T>>
__device__ __forceinline__ void find_slopes(const GradientCall<T>& call, int64_t sample, int64_t first, int patches,
                                            TileSlopes<A>& found) {
  const Slopes<T>& slopes = call.slopes;
  const PatchGrid& grid = slopes.grid;
  const A* colours = slopes.statistic(kColours, sample);
  for (int item = threadIdx.x; call.given.grad_lab && item < patches * kAround; item += kColumnThreads) {
    const int patch = item / kAround, around = item % kAround;
    const Place at(first + patch, grid.rows, grid.columns);
    A apart[3] = {}, square = 0, slope = 0;
    if (at.has(around)) {
      const Place other(at.neighbour(around), grid.rows, grid.columns);
      for (int c = 0; c < 3; ++c) {
        apart[c] = colours[c * grid.count() + at.n] - colours[c * grid.count() + other.n];
        square += apart[c] * apart[c];
      }
      slope = slopes.distance(sample, at) + slopes.distance(sample, other);
    }
    const A distance = sqrt(square);
    for (int c = 0; c < 3; ++c) found.towards[patch][around][c] = distance == 0 ? A(0) : slope * (apart[c] / distance);
  }
  for (int patch = threadIdx.x; patch < patches; patch += kColumnThreads)
    found.edges[patch] = slopes.edge(sample, first + patch);
  __syncthreads();
  for (int item = threadIdx.x; call.given.grad_lab && item < patches * 3; item += kColumnThreads) {
    A sum = 0;
    for (int around = 0; around < kAround; ++around) sum += found.towards[item / 3][around][item % 3];
    found.colours[item / 3][item % 3] = sum;
  }
  __syncthreads();
}

// The gradients of a tile's pixels. A null output is not computed.
template <int Pixels, class T>
__device__ __forceinline__ void tile_gradient(const GradientCall<T>& call, int64_t item) {
  using A = accumulate_t<T>;
  constexpr bool kAligned = Pixels > 1;
  __shared__ TileSlopes<A> slopes;
  const PatchGrid& grid = call.slopes.grid;
  const Tiles& tiles = call.tiles;
  const int64_t part = item % tiles.down, band = item / tiles.down / tiles.across, sample = band / grid.rows;
  const int64_t column = item / tiles.down % tiles.across * tiles.patches;
  const int patches = int(min(int64_t(tiles.patches), grid.columns - column)), patch = int(grid.patch);
  const int height = int(min(int64_t(tiles.height), grid.patch - part * tiles.height));
  find_slopes(call, sample, band % grid.rows * grid.columns + column, patches, slopes);
  const int64_t corner = (band % grid.rows * patch + part * tiles.height) * grid.width + column * patch;
  const int64_t begin = sample * grid.plane + corner, begin_lab = begin + 2 * sample * grid.plane;
  T *out_lab = call.given.grad_lab, *out_x = call.given.grad_x, *out_y = call.given.grad_y;
  // A thread takes every kColumnThreads-th piece of the tile's rows.
  const int pieces = patches * patch / Pixels, down = kColumnThreads / pieces, right = kColumnThreads % pieces;
  int row = int(threadIdx.x) / pieces, piece = int(threadIdx.x) % pieces;
#pragma unroll 2
  while (row < height) {
    const int64_t at = row * grid.width + piece * Pixels, end = at + Pixels;
    const int which = piece * Pixels / patch;
    if (out_x || out_y) {
      A x[Pixels], y[Pixels];
      load<kAligned>(call.given.sobel_x + begin, at, end, x);
      load<kAligned>(call.given.sobel_y + begin, at, end, y);
#pragma unroll
      for (int i = 0; i < Pixels; ++i) {
        const A scale = slopes.edges[which] / sqrt(x[i] * x[i] + y[i] * y[i] + A(kEdgeFloor));
        x[i] *= scale, y[i] *= scale;
      }
      if (out_x) store<kAligned>(out_x + begin, at, end, x);
      if (out_y) store<kAligned>(out_y + begin, at, end, y);
    }
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      if (!out_lab) break;
      A gradient[Pixels];
#pragma unroll
      for (int i = 0; i < Pixels; ++i) gradient[i] = slopes.colours[which][c];
      store<kAligned>(out_lab + begin_lab + c * grid.plane, at, end, gradient);
    }
    row += down, piece += right;
    if (piece >= pieces) piece -= pieces, ++row;
  }
}

// Where a block's thread is among the rows of features.
template <class T>
struct ChunkPlace {
  int64_t sample, first, at;  // first row within the sample; first column
  int rows;
  int64_t which;  // of the chunks of all samples

  __device__ __forceinline__ ChunkPlace(const ColumnCut& cut, int64_t slabs, int64_t item)
      : sample(item / slabs / cut.chunks),
        first(item / slabs % cut.chunks * cut.chunk_rows),
        at((item % slabs * kColumnThreads + threadIdx.x) * kVector<T>),
        rows(int(min(cut.chunk_rows, cut.rows - first))),
        which(item / slabs) {}
};

// Sums h f / |f| over a chunk of rows, for the gradient of the mean's unit vector.
template <bool Aligned, class T>
__device__ __forceinline__ void sum_chunk(const GradientCall<T>& call, int64_t item) {
  using A = accumulate_t<T>;
  __shared__ A slopes[kColumnChunk];
  const ChunkPlace<T> place(call.cut, call.slabs, item);
  const int64_t width = call.cut.width;
  for (int n = threadIdx.x; n < place.rows; n += kColumnThreads)
    slopes[n] = call.slopes.row(place.sample, place.first + n);
  __syncthreads();
  if (place.at >= width) return;
  const T* rows = call.given.features + (place.sample * call.cut.rows + place.first) * width;
  A sum[kVector<T>] = {};
  for (int n = 0; n < place.rows;)
    add_rows<Aligned>(rows, slopes, place.at, width, min(kRowsInFlight, place.rows - n), [&] { return n++; }, sum);
  store<Aligned>(call.partial + place.which * width, place.at, width, sum);
}

enum class Part { pixels, sums, both };

// What needs no sum over rows, and these sums. The pixels come first, so that a cache still holds the last features
// when features_gradient_kernel begins with them.
template <Part part, bool Aligned, int Pixels, class T>
__global__ void __launch_bounds__(kColumnThreads, sizeof(accumulate_t<T>) == 4 ? 5 : 1)
    pixels_and_sums_kernel(const GradientCall<T> call) {
  const int64_t pixel_blocks = part == Part::sums ? 0 : call.pixel_blocks;
  const int64_t sum_blocks = part == Part::pixels ? 0 : call.sum_blocks;
  for (int64_t item = blockIdx.x; item < pixel_blocks + sum_blocks; item += gridDim.x) {
    if constexpr (part != Part::sums) {
      if (item < pixel_blocks) tile_gradient<Pixels>(call, item);
    }
    if constexpr (part != Part::pixels) {
      if (item >= pixel_blocks) sum_chunk<Aligned>(call, item - pixel_blocks);
    }
    __syncthreads();  // shared memory is free
  }
}

template <bool Aligned, int Pixels, class T>
void launch_pixels_and_sums(const GradientCall<T>& call, const Cuda& device) {
  const auto launch = [&](auto kernel, int64_t blocks) {
    if (blocks == 0) return;
    device.launch(kernel, {grid_size(blocks, 1), kColumnThreads}, call);
  };
  // In small batches a launch takes longer than the work. In large ones more threads run if each has fewer registers.
  constexpr int64_t kFew = 4096;
  const int64_t pixels = call.pixel_blocks, sums = call.sum_blocks;
  if (pixels + sums <= kFew) return launch(pixels_and_sums_kernel<Part::both, Aligned, Pixels, T>, pixels + sums);
  launch(pixels_and_sums_kernel<Part::pixels, true, Pixels, T>, pixels);
  launch(pixels_and_sums_kernel<Part::sums, Aligned, 1, T>, sums);
}

// Computes h (unit - c f / |f|) / |f| + shared for the rows of a chunk.
template <bool Aligned, class T>
__global__ void __launch_bounds__(kColumnThreads) features_gradient_kernel(const GradientCall<T> call) {
  using A = accumulate_t<T>;
  constexpr int kPer = kVector<T>;
  __shared__ A slopes[kColumnChunk], alongs[kColumnChunk];
  const int64_t width = call.cut.width;
  for (int64_t item = blockIdx.x; item < call.sum_blocks; item += gridDim.x) {
    const ChunkPlace<T> place(call.cut, call.slabs, call.sum_blocks - 1 - item);
    for (int n = threadIdx.x; n < place.rows; n += kColumnThreads) {
      slopes[n] = call.slopes.row(place.sample, place.first + n);
      alongs[n] = call.slopes.along(place.sample, place.first + n);
    }
    __syncthreads();
    if (place.at < width) {
      const int64_t begin = (place.sample * call.cut.rows + place.first) * width;
      A unit[kPer], common[kPer];
      load<Aligned>(call.given.mean_unit + place.sample * width, place.at, width, unit);
      load<Aligned>(call.shared + place.sample * width, place.at, width, common);
      for (int first = 0; first < place.rows; first += kRowsInFlight) {
        T rows[kRowsInFlight][kPer];
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r)
          if (first + r < place.rows)
            load<Aligned>(call.given.features + begin + (first + r) * width, place.at, width, rows[r]);
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
          if (first + r >= place.rows) continue;
          A result[kPer];
#pragma unroll
          for (int i = 0; i < kPer; ++i)
            result[i] = slopes[first + r] * (unit[i] - alongs[first + r] * A(rows[r][i])) + common[i];
          store<Aligned>(call.given.grad_features + begin + (first + r) * width, place.at, width, result);
        }
      }
    }
    __syncthreads();  // shared memory is free
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const SalienceGrad<T>& inputs) {
  using A = accumulate_t<T>;
  const PatchGrid& grid = inputs.grid;
  const int64_t width = inputs.width;
  const ColumnCut cut(grid.batch, grid.count(), width);
  const Tiles tiles(grid);
  const int64_t slabs = (width + kColumnThreads * kVector<T> - 1) / (kColumnThreads * kVector<T>);
  Scratch<A> partial(device, inputs.grad_features ? cut.partial_size() : 0);
  Scratch<A> shared(device, inputs.grad_features ? grid.batch * width : 0);
  const int64_t pixel_blocks = inputs.grad_lab || inputs.grad_x || inputs.grad_y ? tiles.count : 0;
  const int64_t sum_blocks = inputs.grad_features ? grid.batch * cut.chunks * slabs : 0;
  const GradientCall<T> call{inputs,       Slopes<T>(inputs), tiles,          cut,          slabs,
                             pixel_blocks, sum_blocks,        partial.data(), shared.data()};
  const bool aligned = has_whole_vectors(inputs.features, width) && has_whole_vectors(inputs.grad_features, width) &&
                       has_whole_vectors(inputs.mean_unit, width);
  // If a patch's width is a multiple of 16 bytes, so is the image's, and the patch's rows start on 16 bytes.
  constexpr int kPixels = kVector<T>;
  const bool several =
      start_on_16_bytes(inputs.sobel_x, inputs.sobel_y, inputs.grad_lab, inputs.grad_x, inputs.grad_y) &&
      grid.patch % kPixels == 0;
  const auto first = aligned
                         ? (several ? launch_pixels_and_sums<true, kPixels, T> : launch_pixels_and_sums<true, 1, T>)
                         : (several ? launch_pixels_and_sums<false, kPixels, T> : launch_pixels_and_sums<false, 1, T>);
  first(call, device);
  if (!inputs.grad_features) return;
  launch_through_unit<A>(partial.data(), cut, inputs.mean_unit, inputs.mean_norm, nullptr, 1 / A(cut.rows),
                         shared.data(), device);
  const auto last = aligned ? features_gradient_kernel<true, T> : features_gradient_kernel<false, T>;
  device.launch(last, {grid_size(sum_blocks, 1), kColumnThreads}, call);
}

}  // namespace arr_coc
