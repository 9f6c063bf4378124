#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/column_units.cuh"
#include "common/rows.cuh"
#include "ops/compute_salience/compute_salience.h"
#include "ops/compute_salience/patches.cuh"

namespace arr_coc {
namespace {

// See compute_salience.cpp for the formulas.

// A warp takes kRows rows. The last samples come first: a cache may still hold what the mean was taken of.
template <bool Aligned, class T, class A>
__global__ void salience_kernel(const T* features, const A* unit, const A* edges, const A* colours, T* out,
                                ColumnCut cut, PatchGrid grid, A edge_weight, A contrast_weight, A features_weight) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t per_sample = (cut.rows + kRows - 1) / kRows, items = cut.batch * per_sample;
  for (int64_t at = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; at < items;
       at += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t item = items - 1 - at, sample = item / per_sample, first = item % per_sample * kRows;
    const int rows = int(min(int64_t(kRows), cut.rows - first));
    A squares[kRows], products[kRows][1];
    row_products<1, Aligned>(features + (sample * cut.rows + first) * cut.width, rows, unit + sample * cut.width, 1,
                             cut.width, squares, products);
    A cosine = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (lane == r) cosine = products[r][0] * inverse_norm(sqrt(squares[r]));
    if (lane >= rows) continue;  // the warp meets again at its next shuffle
    const int64_t n = sample * cut.rows + first + lane;
    const A distance = Contrast<A>(colours + sample * cut.rows * 3, grid, first + lane).distance;
    const A edge = edges[n] / (edges[n] + A(kEdgeHalf)), contrast = distance / (distance + A(kContrastHalf));
    out[n] = T(edge_weight * edge + contrast_weight * contrast + features_weight * (1 - cosine) / 2);
  }
}

// A block a chunk of rows, which comes from memory once and a second time from a cache: their column sums, each row
// weighted by the factor of its unit vector in the mean's gradient, h / |f|.
template <bool Aligned, class T, class A>
__global__ void __launch_bounds__(kCosineThreads)
    weighted_sums_kernel(const T* grad, const T* features, A* weighted, ColumnCut cut, A weight) {
  constexpr int kPer = kPerLane<T>;
  __shared__ A factors[kColumnChunk];
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t item = blockIdx.x; item < cut.batch * cut.chunks; item += gridDim.x) {
    const int64_t sample = item / cut.chunks, chunk = item % cut.chunks * cut.chunk_rows;
    const int64_t first = sample * cut.rows + chunk;
    const int rows = int(min(cut.chunk_rows, cut.rows - chunk));
    for (int at = threadIdx.x / kWarpSize * kRows; at < rows; at += kCosineWarps * kRows) {
      A squares[kRows];
      row_squares<Aligned>(features + (first + at) * cut.width, min(kRows, rows - at), cut.width, squares);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (lane == r && at + r < rows)
          factors[at + r] = -A(grad[first + at + r]) * weight / 2 * inverse_norm(sqrt(squares[r]));
    }
    __syncthreads();
    for (int64_t at = threadIdx.x * kPer; at < cut.width; at += kCosineThreads * kPer) {
      A sums[kPer] = {};
#pragma unroll 8
      for (int n = 0; n < rows; ++n) {
        A row[kPer];
        load<Aligned>(features + (first + n) * cut.width, at, cut.width, row);
#pragma unroll
        for (int i = 0; i < kPer; ++i) sums[i] += factors[n] * row[i];
      }
      store<Aligned>(weighted + item * cut.width, at, cut.width, sums);
    }
    __syncthreads();
  }
}

// A warp a row: h (unit - cos f / |f|) / |f| + shared. The last samples come first: a cache may still hold them.
template <bool Aligned, class T, class A>
__global__ void __launch_bounds__(kCosineThreads)
    features_grad_kernel(const T* grad, const T* features, const A* unit, const A* shared, T* out, ColumnCut cut,
                         A weight) {
  constexpr int kPer = kPerLane<T>;
  const int64_t total = cut.batch * cut.rows, width = cut.width;
  for (int64_t item = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; item < total;
       item += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t n = total - 1 - item, mean = n / cut.rows * width;
    const A slope = -A(grad[n]) * weight / 2;
    RowTile<T> tile;
    A square = 0, product = 0;
    for (int64_t start = 0; start < width; start += kTile<T>) {
      const int size = RowTile<T>::size(start, width);
      tile.template load<Aligned>(features + n * width + start, size);
      tile.template for_pieces<Aligned, A>(size, [&](int k, const auto& x, int inside) {
        A u[kPer];
        load<Aligned>(unit + mean, start + RowTile<T>::at(k), width, u);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          if (i >= inside) continue;
          square += x[i] * x[i];
          product += x[i] * u[i];
        }
      });
    }
    const A norm = sqrt(warp_sum(square)), inverse = inverse_norm(norm), scale = slope * inverse;
    const A along = norm_passes(norm) * warp_sum(product) * inverse * inverse;
    for (int64_t start = 0; start < width; start += kTile<T>) {
      const int size = RowTile<T>::size(start, width);
      if (width > kTile<T>) tile.template load<Aligned>(features + n * width + start, size);
      tile.template for_pieces<Aligned, A>(size, [&](int k, const auto& x, int inside) {
        const int64_t at = start + RowTile<T>::at(k);
        A u[kPer], common[kPer], result[kPer];
        load<Aligned>(unit + mean, at, width, u);
        load<Aligned>(shared + mean, at, width, common);
#pragma unroll
        for (int i = 0; i < kPer; ++i) result[i] = scale * (u[i] - along * x[i]) + common[i];
        store<Aligned>(out + n * width, at, at + inside, result);
      });
    }
  }
}

// Uninitialised memory of torch's allocator for `size` elements of A.
template <class A>
class Scratch {
 public:
  Scratch(const Tensor& like, int64_t size) : tensor_(torch::stable::new_empty(like, {size}, scalar_type_of<A>)) {}
  A* data() { return static_cast<A*>(tensor_.mutable_data_ptr()); }

 private:
  Tensor tensor_;
};

template <class F>
void dispatch_aligned(bool aligned, const F& f) {
  return aligned ? f(std::true_type{}) : f(std::false_type{});
}

unsigned row_blocks(const ColumnCut& cut) {
  return grid_size(cut.batch * ((cut.rows + kRows - 1) / kRows), kCosineWarps);
}

template <class T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* data_of(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Salience, and what the gradient reads of the whole image: see compute_salience_forward in compute_salience.py.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> salience_and_statistics(const char* op, const Tensor& features,
                                                                           const Tensor& lab, const Tensor& sobel_x,
                                                                           const Tensor& sobel_y, int64_t patch_size,
                                                                           const std::vector<double>& weights) {
  check_compute_salience(op, features, lab, sobel_x, sobel_y, patch_size, weights);
  const CudaScope scope(features);
  const Tensor x = torch::stable::contiguous(features), colour = torch::stable::contiguous(lab),
               gx = torch::stable::contiguous(sobel_x), gy = torch::stable::contiguous(sobel_y);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2);
  const ScalarType wide = statistics_dtype(x);
  Tensor salience = torch::stable::new_empty(x, {batch, count}),
         mean_unit = torch::stable::new_empty(x, {batch, width}, wide),
         mean_norm = torch::stable::new_empty(x, {batch, 1}, wide),
         edges = torch::stable::new_empty(x, {batch, count}, wide),
         colours = torch::stable::new_empty(x, {batch, 3, count}, wide);
  if (batch * count == 0)
    return {salience, torch::stable::zero_(mean_unit), torch::stable::zero_(mean_norm), edges, colours};
  const PatchGrid grid(lab, patch_size);
  const ColumnCut cut(batch, count, width);
  const SalienceWeights weight(weights);
  const cudaStream_t stream = scope.stream();
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = data_of<T>(x);
    Scratch<A> partial(x, cut.partial_size());
    launch_patch_means(data_of<T>(colour), data_of<T>(gx), data_of<T>(gy), data_of<A>(edges), data_of<A>(colours), grid,
                       stream);
    launch_column_sums<T, A>(in, nullptr, nullptr, partial.data(), cut, stream);
    launch_mean_unit<A>(partial.data(), data_of<A>(mean_unit), data_of<A>(mean_norm), cut, stream);
    dispatch_aligned(is_vectorisable(in, width), [&](auto aligned) {
      salience_kernel<aligned.value, T, A><<<row_blocks(cut), kCosineThreads, 0, stream>>>(
          in, data_of<A>(mean_unit), data_of<A>(edges), data_of<A>(colours), data_of<T>(salience), cut, grid,
          A(weight.edges), A(weight.contrast), A(weight.features));
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return {salience, mean_unit, mean_norm, edges, colours};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> compute_salience_forward_cuda(
    const Tensor& features, const Tensor& lab, const Tensor& sobel_x, const Tensor& sobel_y, int64_t patch_size,
    std::vector<double> weights) {
  return salience_and_statistics("compute_salience_forward", features, lab, sobel_x, sobel_y, patch_size, weights);
}

Tensor compute_salience_cuda(const Tensor& features, const Tensor& lab, const Tensor& sobel_x, const Tensor& sobel_y,
                             int64_t patch_size, std::vector<double> weights) {
  return std::get<0>(salience_and_statistics("compute_salience", features, lab, sobel_x, sobel_y, patch_size, weights));
}

template <class T, class A = accumulate_t<T>>
void features_grad(const T* grad, const Tensor& features, const Tensor& mean_unit, const Tensor& mean_norm, T* out,
                   A weight, cudaStream_t stream) {
  const Tensor x = torch::stable::contiguous(features), unit = torch::stable::contiguous(mean_unit),
               norm = torch::stable::contiguous(mean_norm);
  const T* in = data_of<T>(x);
  const ColumnCut cut(x.size(0), x.size(1), x.size(2));
  Scratch<A> weighted(x, cut.partial_size()), shared(x, cut.batch * cut.width);
  const bool aligned = is_vectorisable(in, cut.width) && is_vectorisable(data_of<A>(unit), cut.width);
  const auto sums = aligned ? weighted_sums_kernel<true, T, A> : weighted_sums_kernel<false, T, A>;
  sums<<<grid_size(cut.batch * cut.chunks, 1), kCosineThreads, 0, stream>>>(grad, in, weighted.data(), cut, weight);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  launch_through_unit<A>(weighted.data(), cut, data_of<A>(unit), data_of<A>(norm), nullptr, 1 / A(cut.rows),
                         shared.data(), stream);
  const auto gradient =
      aligned && is_vectorisable(out, cut.width) ? features_grad_kernel<true, T, A> : features_grad_kernel<false, T, A>;
  gradient<<<grid_size(cut.batch * cut.rows, kCosineWarps), kCosineThreads, 0, stream>>>(
      grad, in, data_of<A>(unit), shared.data(), out, cut, weight);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// A null output is not needed.
template <class T, class A = accumulate_t<T>>
void pixels_grad(const T* grad, const Tensor& sobel_x, const Tensor& sobel_y, const Tensor& edges,
                 const Tensor& colours, T* out_lab, T* out_x, T* out_y, const PatchGrid& grid,
                 const SalienceWeights& weight, cudaStream_t stream) {
  const bool need_sobel = out_x || out_y;
  const Tensor gx = need_sobel ? torch::stable::contiguous(sobel_x) : sobel_x;
  const Tensor gy = need_sobel ? torch::stable::contiguous(sobel_y) : sobel_y;
  const Tensor strengths = torch::stable::contiguous(edges), means = torch::stable::contiguous(colours);
  const int64_t patches = grid.batch * grid.count(), of_sobel = need_sobel ? patches : 0,
                of_lab = out_lab ? patches : 0;
  Scratch<A> edge_slope_memory(edges, of_sobel), contrast_slope_memory(edges, of_lab),
      gradient_memory(edges, of_lab * 3);
  A* edge_slopes = need_sobel ? edge_slope_memory.data() : nullptr;
  A* contrast_slopes = out_lab ? contrast_slope_memory.data() : nullptr;
  patch_slopes_kernel<<<grid_size(patches, kCosineThreads), kCosineThreads, 0, stream>>>(
      grad, data_of<A>(strengths), data_of<A>(means), edge_slopes, contrast_slopes, grid, A(weight.edges),
      A(weight.contrast));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  A* gradients = out_lab ? gradient_memory.data() : nullptr;
  if (out_lab) {
    colour_gradient_kernel<<<grid_size(patches, kCosineThreads), kCosineThreads, 0, stream>>>(
        data_of<A>(means), contrast_slopes, gradients, grid);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  const bool aligned = on_16_bytes(data_of<T>(gx), data_of<T>(gy), out_lab, out_x, out_y);
  dispatch_patch<T>(grid, aligned, [&](auto warps, auto pixels, unsigned blocks) {
    pixels_grad_kernel<warps.value, pixels.value><<<blocks, kCosineThreads, 0, stream>>>(
        data_of<T>(gx), data_of<T>(gy), gradients, edge_slopes, out_lab, out_x, out_y, grid);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> compute_salience_grad_cuda(
    const Tensor& grad, const Tensor& features, const Tensor& sobel_x, const Tensor& sobel_y, const Tensor& mean_unit,
    const Tensor& mean_norm, const Tensor& edges, const Tensor& colours, int64_t patch_size,
    std::vector<double> weights, bool need_features, bool need_lab, bool need_sobel_x, bool need_sobel_y) {
  check_compute_salience_grad(grad, features, sobel_x, sobel_y, mean_unit, mean_norm, edges, colours, patch_size,
                              weights);
  const CudaScope scope(features);
  const Tensor g = torch::stable::contiguous(grad);
  const auto like_or_nothing = [](const Tensor& plane, int64_t channels, bool needed) {
    return needed ? torch::stable::new_empty(plane, {plane.size(0), channels, plane.size(2), plane.size(3)})
                  : torch::stable::new_empty(plane, {0});
  };
  Tensor grad_features = need_features ? torch::stable::new_empty(features, features.sizes())
                                       : torch::stable::new_empty(features, {0}),
         grad_lab = like_or_nothing(sobel_x, 3, need_lab), grad_x = like_or_nothing(sobel_x, 1, need_sobel_x),
         grad_y = like_or_nothing(sobel_y, 1, need_sobel_y);
  if (g.numel() == 0) return {grad_features, grad_lab, grad_x, grad_y};
  const SalienceWeights weight(weights);
  dispatch_floating(features.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const auto output = [](Tensor& tensor, bool needed) { return needed ? data_of<T>(tensor) : nullptr; };
    if (need_features)
      features_grad(data_of<T>(g), features, mean_unit, mean_norm, output(grad_features, true),
                    accumulate_t<T>(weight.features), scope.stream());
    if (need_lab || need_sobel_x || need_sobel_y)
      pixels_grad(data_of<T>(g), sobel_x, sobel_y, edges, colours, output(grad_lab, need_lab),
                  output(grad_x, need_sobel_x), output(grad_y, need_sobel_y), PatchGrid(sobel_x, patch_size), weight,
                  scope.stream());
  });
  return {grad_features, grad_lab, grad_x, grad_y};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("compute_salience", TORCH_BOX(&compute_salience_cuda));
  m.impl("compute_salience_forward", TORCH_BOX(&compute_salience_forward_cuda));
  m.impl("compute_salience_grad", TORCH_BOX(&compute_salience_grad_cuda));
}

}  // namespace arr_coc
