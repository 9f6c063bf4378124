#include <torch/csrc/stable/library.h>

#include <tuple>

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

// Salience and the statistics for its gradient: see compute_salience_forward in compute_salience.py.
std::tuple<Tensor, Tensor, Tensor, Tensor> salience_and_statistics(const char* op, const Tensor& features,
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
         patches = torch::stable::new_empty(x, {batch, kStatistics, count}, wide);
  if (batch * count == 0) return {salience, torch::stable::zero_(mean_unit), torch::stable::zero_(mean_norm), patches};
  const PatchGrid grid(lab, patch_size);
  const ColumnCut cut(batch, count, width);
  const SalienceWeights weight(weights);
  const cudaStream_t stream = scope.stream();
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = data_of<T>(x);
    A *unit = data_of<A>(mean_unit), *statistics = data_of<A>(patches);
    Scratch<A> partial(x, cut.partial_size());
    launch_patch_means(data_of<T>(colour), data_of<T>(gx), data_of<T>(gy), statistics, grid, stream);
    launch_column_sums<T, A>(in, nullptr, nullptr, partial.data(), cut, stream);
    launch_mean_unit<A>(partial.data(), unit, data_of<A>(mean_norm), cut, stream);
    dispatch_aligned(is_vectorisable(in, width), [&](auto aligned) {
      salience_kernel<aligned.value>
          <<<row_blocks(cut), kCosineThreads, 0, stream>>>(in, unit, statistics, data_of<T>(salience), cut, grid,
                                                           A(weight.edges), A(weight.contrast), A(weight.features));
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return {salience, mean_unit, mean_norm, patches};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> compute_salience_forward_cuda(const Tensor& features, const Tensor& lab,
                                                                         const Tensor& sobel_x, const Tensor& sobel_y,
                                                                         int64_t patch_size,
                                                                         std::vector<double> weights) {
  return salience_and_statistics("compute_salience_forward", features, lab, sobel_x, sobel_y, patch_size, weights);
}

Tensor compute_salience_cuda(const Tensor& features, const Tensor& lab, const Tensor& sobel_x, const Tensor& sobel_y,
                             int64_t patch_size, std::vector<double> weights) {
  return std::get<0>(salience_and_statistics("compute_salience", features, lab, sobel_x, sobel_y, patch_size, weights));
}

template <class T, class A = accumulate_t<T>>
void features_grad(const Tensor& features, const Slopes<A>& slopes, const Tensor& mean_unit, const Tensor& mean_norm,
                   T* out, cudaStream_t stream) {
  const Tensor x = torch::stable::contiguous(features), unit = torch::stable::contiguous(mean_unit),
               norm = torch::stable::contiguous(mean_norm);
  const T* in = data_of<T>(x);
  const ColumnCut cut(x.size(0), x.size(1), x.size(2));
  Scratch<A> partial(x, cut.partial_size()), shared(x, cut.batch * cut.width);
  launch_column_sums<T, A>(in, slopes.features, nullptr, partial.data(), cut, stream);
  launch_through_unit<A>(partial.data(), cut, data_of<A>(unit), data_of<A>(norm), nullptr, 1 / A(cut.rows),
                         shared.data(), stream);
  const ColumnBlocks blocks = column_blocks<T>(cut);
  const bool aligned =
      is_vectorisable(in, cut.width) && is_vectorisable(out, cut.width) && is_vectorisable(data_of<A>(unit), cut.width);
  const auto kernel = aligned ? features_grad_kernel<true, T, A> : features_grad_kernel<false, T, A>;
  kernel<<<blocks.count, blocks.threads, 0, stream>>>(in, slopes, data_of<A>(unit), shared.data(), out, cut,
                                                      blocks.slabs);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// A null output is not computed. `gradients` is memory for [B, N, 3].
template <class T, class A = accumulate_t<T>>
void pixels_grad(const Tensor& sobel_x, const Tensor& sobel_y, const A* patches, const Slopes<A>& slopes, A* gradients,
                 T* out_lab, T* out_x, T* out_y, const PatchGrid& grid, cudaStream_t stream) {
  const bool need_sobel = out_x || out_y;
  const Tensor gx = need_sobel ? torch::stable::contiguous(sobel_x) : sobel_x;
  const Tensor gy = need_sobel ? torch::stable::contiguous(sobel_y) : sobel_y;
  if (out_lab) {
    colour_gradient_kernel<<<grid_size(grid.batch * grid.count(), kCosineThreads), kCosineThreads, 0, stream>>>(
        patches, slopes.contrast, gradients, grid);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  // If a patch's width is a multiple of 16 bytes, so is the image's, and the patch's rows start on 16 bytes.
  const bool several =
      on_16_bytes(data_of<T>(gx), data_of<T>(gy), out_lab, out_x, out_y) && grid.patch % kPerLane<T> == 0;
  const Strips strips(grid, grid.width / (several ? kPerLane<T> : 1));
  const auto kernel = several ? pixels_grad_kernel<kPerLane<T>, T, A> : pixels_grad_kernel<1, T, A>;
  kernel<<<grid_size(strips.count, 1), kCosineThreads, 0, stream>>>(data_of<T>(gx), data_of<T>(gy), gradients,
                                                                    slopes.edges, out_lab, out_x, out_y, grid, strips);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor, Tensor, Tensor> compute_salience_grad_cuda(
    const Tensor& grad, const Tensor& features, const Tensor& sobel_x, const Tensor& sobel_y, const Tensor& mean_unit,
    const Tensor& mean_norm, const Tensor& patches, int64_t patch_size, std::vector<double> weights, bool need_features,
    bool need_lab, bool need_sobel_x, bool need_sobel_y) {
  check_compute_salience_grad(grad, features, sobel_x, sobel_y, mean_unit, mean_norm, patches, patch_size, weights);
  const CudaScope scope(features);
  const auto plane_or_nothing = [](const Tensor& plane, int64_t channels, bool needed) {
    return needed ? torch::stable::new_empty(plane, {plane.size(0), channels, plane.size(2), plane.size(3)})
                  : torch::stable::new_empty(plane, {0});
  };
  Tensor grad_features = need_features ? torch::stable::new_empty(features, features.sizes())
                                       : torch::stable::new_empty(features, {0}),
         grad_lab = plane_or_nothing(sobel_x, 3, need_lab), grad_x = plane_or_nothing(sobel_x, 1, need_sobel_x),
         grad_y = plane_or_nothing(sobel_y, 1, need_sobel_y);
  if (grad.numel() == 0) return {grad_features, grad_lab, grad_x, grad_y};
  const Tensor g = torch::stable::contiguous(grad), statistics = torch::stable::contiguous(patches);
  const PatchGrid grid(sobel_x, patch_size);
  dispatch_floating(features.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t count = g.numel();
    Scratch<A> memory(features, 7 * count);
    A* free = memory.data();
    const Slopes<A> slopes{free, free + count, free + 2 * count, free + 3 * count};
    slopes_kernel<<<grid_size(count, kCosineThreads), kCosineThreads, 0, scope.stream()>>>(
        data_of<T>(g), data_of<A>(statistics), slopes, grid, SalienceWeights(weights));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (need_features) features_grad(features, slopes, mean_unit, mean_norm, data_of<T>(grad_features), scope.stream());
    const auto output = [](Tensor& tensor, bool needed) { return needed ? data_of<T>(tensor) : nullptr; };
    if (need_lab || need_sobel_x || need_sobel_y)
      pixels_grad(sobel_x, sobel_y, data_of<A>(statistics), slopes, free + 4 * count, output(grad_lab, need_lab),
                  output(grad_x, need_sobel_x), output(grad_y, need_sobel_y), grid, scope.stream());
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
