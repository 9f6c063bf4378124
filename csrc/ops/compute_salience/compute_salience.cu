#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/cosine.cuh"
#include "ops/compute_salience/compute_salience.h"

namespace arr_coc {
namespace {

// See compute_salience.cpp for the formulas.

// A patch is read by one warp, or by a whole block where it has more pixels than this.
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

// Calls f(offset) for the calling thread's share of a patch's pixels; `thread` is 0 to Warps x kWarpSize - 1.
// Neighbouring threads take neighbouring pixels, and there is no division in the loop.
template <int Warps, class F>
__device__ __forceinline__ void for_pixels(const PatchGrid& grid, int thread, const F& f) {
  constexpr int64_t kStride = Warps * kWarpSize;
  const int64_t down = kStride / grid.patch, right = kStride % grid.patch;
  int64_t y = thread / grid.patch, x = thread % grid.patch;
  while (y < grid.patch) {
    f(y * grid.width + x);
    y += down, x += right;
    if (x >= grid.patch) x -= grid.patch, ++y;
  }
}

// Mean gradient magnitude [B, N] and mean colour [B, N, 3] of each patch. A null output is not needed.
template <int Warps, class T, class A>
__global__ void patch_means_kernel(const T* lab, const T* sobel_x, const T* sobel_y, A* edges, A* colours,
                                   PatchGrid grid) {
  __shared__ A shared[kCosineWarps];
  constexpr int kPatches = kCosineWarps / Warps;
  const int thread = threadIdx.x % (Warps * kWarpSize);
  const A area = A(grid.patch * grid.patch);
  for (int64_t item = int64_t(blockIdx.x) * kPatches + threadIdx.x / (Warps * kWarpSize);
       item < grid.batch * grid.count(); item += int64_t(gridDim.x) * kPatches) {
    const int64_t sample = item / grid.count(), corner = grid.corner(item % grid.count());
    if (edges) {
      const T *gx = sobel_x + sample * grid.plane + corner, *gy = sobel_y + sample * grid.plane + corner;
      A sum = 0;
      for_pixels<Warps>(grid, thread, [&](int64_t at) {
        sum += sqrt(A(gx[at]) * A(gx[at]) + A(gy[at]) * A(gy[at]) + A(kEdgeFloor));
      });
      sum = patch_sum<Warps>(sum, shared);
      if (thread == 0) edges[item] = sum / area;
    }
    if (colours) {
      const T* channel = lab + sample * 3 * grid.plane + corner;
      A sum[3] = {0, 0, 0};
      for_pixels<Warps>(grid, thread, [&](int64_t at) {
#pragma unroll
        for (int c = 0; c < 3; ++c) sum[c] += A(channel[c * grid.plane + at]);
      });
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        sum[c] = patch_sum<Warps>(sum[c], shared);
        if (thread == 0) colours[item * 3 + c] = sum[c] / area;
      }
    }
  }
}

// A block a sample: the mean of the features, of which `partial` holds the sums over chunks, as a unit vector and a
// norm.
template <class A>
__global__ void mean_unit_kernel(const A* partial, ColumnCut cut, A* unit, A* norm) {
  __shared__ A shared[kCosineWarps];
  for (int64_t sample = blockIdx.x; sample < cut.batch; sample += gridDim.x) {
    A* out = unit + sample * cut.width;
    A square = 0;
    for (int64_t d = threadIdx.x; d < cut.width; d += kCosineThreads) {
      const A mean = summed_chunks(partial, cut, sample, 0, d) / A(cut.rows);
      out[d] = mean;  // read again below, by this thread
      square += mean * mean;
    }
    const A length = sqrt(block_sum(square, shared)), inverse = inverse_norm(length);
    for (int64_t d = threadIdx.x; d < cut.width; d += kCosineThreads) out[d] *= inverse;
    if (threadIdx.x == 0) norm[sample] = length;
  }
}

// One warp takes kRows rows of one sample from item * kRows on; lane r gets row r's norm and its cosine with the
// sample's mean. Returns the flat index of the first row, and in `rows` how many there are.
template <bool Aligned, class T, class A>
__device__ __forceinline__ int64_t cosines_with_mean(const T* features, const A* unit, const ColumnCut& cut,
                                                     int64_t item, int& rows, A& norm, A& cosine) {
  const int64_t per_sample = (cut.rows + kRows - 1) / kRows, sample = item / per_sample;
  const int64_t first = item % per_sample * kRows, base = sample * cut.rows + first;
  rows = int(min(int64_t(kRows), cut.rows - first));
  A squares[kRows], products[kRows][1];
  row_products<1, Aligned>(features + base * cut.width, rows, unit + sample * cut.width, 1, cut.width, squares,
                           products);
  norm = cosine = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (threadIdx.x % kWarpSize != r) continue;
    norm = sqrt(squares[r]);
    cosine = products[r][0] * inverse_norm(norm);
  }
  return base;
}

template <bool Aligned, class T, class A>
__global__ void salience_kernel(const T* features, const A* unit, const A* edges, const A* colours, T* out,
                                ColumnCut cut, PatchGrid grid, A edge_weight, A contrast_weight, A features_weight) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t items = cut.batch * ((cut.rows + kRows - 1) / kRows);
  for (int64_t item = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; item < items;
       item += int64_t(gridDim.x) * kCosineWarps) {
    int rows;
    A norm, cosine;
    const int64_t base = cosines_with_mean<Aligned>(features, unit, cut, item, rows, norm, cosine);
    if (lane >= rows) continue;  // the warp meets again at its next shuffle
    const int64_t n = base + lane, sample = n / cut.rows;
    const A distance = Contrast<A>(colours + sample * cut.rows * 3, grid, n % cut.rows).distance;
    const A edge = edges[n] / (edges[n] + A(kEdgeHalf)), contrast = distance / (distance + A(kContrastHalf));
    out[n] = T(edge_weight * edge + contrast_weight * contrast + features_weight * (1 - cosine) / 2);
  }
}

// For each row the factor of its unit mean in its own gradient, h / |f|, and how much of the row is taken from that
// mean.
template <bool Aligned, class T, class A>
__global__ void row_factors_kernel(const T* grad, const T* features, const A* unit, A* factor, A* along, ColumnCut cut,
                                   A weight) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t items = cut.batch * ((cut.rows + kRows - 1) / kRows);
  for (int64_t item = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; item < items;
       item += int64_t(gridDim.x) * kCosineWarps) {
    int rows;
    A norm, cosine;
    const int64_t base = cosines_with_mean<Aligned>(features, unit, cut, item, rows, norm, cosine);
    if (lane >= rows) continue;
    const A inverse = inverse_norm(norm);
    factor[base + lane] = -A(grad[base + lane]) * weight / 2 * inverse;
    along[base + lane] = norm_passes(norm) * cosine * inverse;
  }
}

// A warp a row: factor (unit - along f) + shared.
template <bool Aligned, class T, class A>
__global__ void features_grad_kernel(const T* features, const A* unit, const A* factor, const A* along, const A* shared,
                                     T* out, ColumnCut cut) {
  constexpr int kPer = kPerLane<T>;
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t n = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; n < cut.batch * cut.rows;
       n += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t mean = n / cut.rows * cut.width;
    const A scale = factor[n], taken = along[n];
    for (int64_t at = lane * kPer; at < cut.width; at += kWarpSize * kPer) {
      A x[kPer], u[kPer], common[kPer], result[kPer];
      load<Aligned>(features + n * cut.width, at, cut.width, x);
      load<Aligned>(unit + mean, at, cut.width, u);
      load<Aligned>(shared + mean, at, cut.width, common);
#pragma unroll
      for (int i = 0; i < kPer; ++i) result[i] = scale * (u[i] - taken * x[i]) + common[i];
      store<Aligned>(out + n * cut.width, at, cut.width, result);
    }
  }
}

// A thread a patch: the gradient of each of its pixels' magnitudes, and of each of its distances to a neighbour as it
// reaches a pixel. A null output is not needed.
template <class T, class A>
__global__ void patch_slopes_kernel(const T* grad, const A* edges, const A* colours, A* edge_slopes, A* contrast_slopes,
                                    PatchGrid grid, A edge_weight, A contrast_weight) {
  const A area = A(grid.patch * grid.patch);
  const int64_t count = grid.count();
  for (int64_t n = int64_t(blockIdx.x) * kCosineThreads + threadIdx.x; n < grid.batch * count;
       n += int64_t(gridDim.x) * kCosineThreads) {
    if (edge_slopes) {
      const A shifted = edges[n] + A(kEdgeHalf);
      edge_slopes[n] = A(grad[n]) * edge_weight * A(kEdgeHalf) / (shifted * shifted) / area;
    }
    if (contrast_slopes) {
      const Contrast<A> contrast(colours + n / count * count * 3, grid, n % count);
      contrast_slopes[n] = A(grad[n]) * contrast_weight * contrast.slope() / area;
    }
  }
}

// The pixels' gradients. A null output is not needed; `contrast_slopes` comes with `out_lab`, `edge_slopes` with the
// others.
template <int Warps, class T, class A>
__global__ void pixels_grad_kernel(const T* sobel_x, const T* sobel_y, const A* colours, const A* edge_slopes,
                                   const A* contrast_slopes, T* out_lab, T* out_x, T* out_y, PatchGrid grid) {
  constexpr int kPatches = kCosineWarps / Warps;
  const int thread = threadIdx.x % (Warps * kWarpSize);
  const int64_t count = grid.count();
  for (int64_t item = int64_t(blockIdx.x) * kPatches + threadIdx.x / (Warps * kWarpSize); item < grid.batch * count;
       item += int64_t(gridDim.x) * kPatches) {
    const int64_t n = item % count, first = item - n, corner = grid.corner(n), sample = item / count;
    if (out_lab) {
      A gradient[3];  // every thread of the patch computes the same
      colour_gradient(colours + first * 3, contrast_slopes + first, grid, n, gradient);
      T* channel = out_lab + sample * 3 * grid.plane + corner;
      for_pixels<Warps>(grid, thread, [&](int64_t at) {
#pragma unroll
        for (int c = 0; c < 3; ++c) channel[c * grid.plane + at] = T(gradient[c]);
      });
    }
    if (out_x || out_y) {
      const int64_t base = sample * grid.plane + corner;
      for_pixels<Warps>(grid, thread, [&](int64_t at) {
        const A gx = A(sobel_x[base + at]), gy = A(sobel_y[base + at]);
        const A scale = edge_slopes[item] / sqrt(gx * gx + gy * gy + A(kEdgeFloor));
        if (out_x) out_x[base + at] = T(scale * gx);
        if (out_y) out_y[base + at] = T(scale * gy);
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

// Calls f(warps, blocks): how many warps take one patch, as a type, and the grid that covers every patch.
template <class F>
void dispatch_patch(const PatchGrid& grid, const F& f) {
  const int64_t patches = grid.batch * grid.count();
  // patch <= kWarpPatch first: the product could overflow.
  if (grid.patch <= kWarpPatch && grid.patch * grid.patch <= kWarpPatch)
    return f(std::integral_constant<int, 1>{}, grid_size(patches, kCosineWarps));
  return f(std::integral_constant<int, kCosineWarps>{}, grid_size(patches, 1));
}

// A null output is not needed, nor then are its inputs.
template <class T, class A>
void launch_patch_means(const T* lab, const T* sobel_x, const T* sobel_y, A* edges, A* colours, const PatchGrid& grid,
                        cudaStream_t stream) {
  dispatch_patch(grid, [&](auto warps, unsigned blocks) {
    patch_means_kernel<warps.value><<<blocks, kCosineThreads, 0, stream>>>(lab, sobel_x, sobel_y, edges, colours, grid);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// `partial` holds cut.partial_size() elements and may be used again once the stream is past this.
template <class T, class A>
void launch_mean_unit(const T* features, A* partial, A* unit, A* norm, const ColumnCut& cut, cudaStream_t stream) {
  launch_column_sums<T, A>(features, nullptr, nullptr, partial, cut, stream);
  mean_unit_kernel<<<grid_size(cut.batch, 1), kCosineThreads, 0, stream>>>(partial, cut, unit, norm);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

unsigned row_blocks(const ColumnCut& cut) {
  return grid_size(cut.batch * ((cut.rows + kRows - 1) / kRows), kCosineWarps);
}

template <class T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

Tensor compute_salience_cuda(const Tensor& features, const Tensor& lab, const Tensor& sobel_x, const Tensor& sobel_y,
                             int64_t patch_size, std::vector<double> weights) {
  check_compute_salience(features, lab, sobel_x, sobel_y, patch_size, weights);
  const CudaScope scope(features);
  const Tensor x = torch::stable::contiguous(features), colour = torch::stable::contiguous(lab),
               gx = torch::stable::contiguous(sobel_x), gy = torch::stable::contiguous(sobel_y);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2);
  Tensor salience = torch::stable::new_empty(x, {batch, count});
  if (batch * count == 0) return salience;
  const PatchGrid grid(lab, patch_size);
  const ColumnCut cut(batch, count, width, 1);
  const SalienceWeights weight(weights);
  const cudaStream_t stream = scope.stream();
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = data_of<T>(x);
    Scratch<A> edges(x, batch * count), colours(x, batch * count * 3), partial(x, cut.partial_size()),
        unit(x, batch * width), norm(x, batch);
    launch_patch_means(data_of<T>(colour), data_of<T>(gx), data_of<T>(gy), edges.data(), colours.data(), grid, stream);
    launch_mean_unit(in, partial.data(), unit.data(), norm.data(), cut, stream);
    dispatch_aligned(is_vectorisable(in, width), [&](auto aligned) {
      salience_kernel<aligned.value><<<row_blocks(cut), kCosineThreads, 0, stream>>>(
          in, unit.data(), edges.data(), colours.data(), static_cast<T*>(salience.mutable_data_ptr()), cut, grid,
          A(weight.edges), A(weight.contrast), A(weight.features));
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return salience;
}

template <class T, class A = accumulate_t<T>>
void features_grad(const T* grad, const Tensor& features, T* out, A weight, cudaStream_t stream) {
  const Tensor x = torch::stable::contiguous(features);
  const T* in = data_of<T>(x);
  const ColumnCut cut(x.size(0), x.size(1), x.size(2), 1);
  Scratch<A> partial(x, cut.partial_size()), unit(x, cut.batch * cut.width), norm(x, cut.batch),
      factor(x, cut.batch * cut.rows), along(x, cut.batch * cut.rows), shared(x, cut.batch * cut.width);
  launch_mean_unit(in, partial.data(), unit.data(), norm.data(), cut, stream);
  dispatch_aligned(is_vectorisable(in, cut.width), [&](auto aligned) {
    row_factors_kernel<aligned.value><<<row_blocks(cut), kCosineThreads, 0, stream>>>(
        grad, in, unit.data(), factor.data(), along.data(), cut, weight);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  launch_column_sums<T, A>(in, factor.data(), nullptr, partial.data(), cut, stream);
  through_unit_kernel<<<grid_size(cut.batch, 1), kCosineThreads, 0, stream>>>(
      partial.data(), cut, unit.data(), norm.data(), static_cast<const bool*>(nullptr), 1 / A(cut.rows), shared.data());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  dispatch_aligned(is_vectorisable(in, cut.width) && is_vectorisable(out, cut.width), [&](auto aligned) {
    features_grad_kernel<aligned.value><<<grid_size(cut.batch * cut.rows, kCosineWarps), kCosineThreads, 0, stream>>>(
        in, unit.data(), factor.data(), along.data(), shared.data(), out, cut);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// A null output is not needed.
template <class T, class A = accumulate_t<T>>
void pixels_grad(const T* grad, const Tensor& lab, const Tensor& sobel_x, const Tensor& sobel_y, T* out_lab, T* out_x,
                 T* out_y, const PatchGrid& grid, const SalienceWeights& weight, cudaStream_t stream) {
  const bool need_sobel = out_x || out_y;
  const Tensor colour = out_lab ? torch::stable::contiguous(lab) : lab;
  const Tensor gx = need_sobel ? torch::stable::contiguous(sobel_x) : sobel_x;
  const Tensor gy = need_sobel ? torch::stable::contiguous(sobel_y) : sobel_y;
  const int64_t patches = grid.batch * grid.count(), of_sobel = need_sobel ? patches : 0,
                of_lab = out_lab ? patches : 0;
  Scratch<A> edge_memory(lab, of_sobel), edge_slope_memory(lab, of_sobel), colour_memory(lab, of_lab * 3),
      contrast_slope_memory(lab, of_lab);
  A* edges = need_sobel ? edge_memory.data() : nullptr;
  A* edge_slopes = need_sobel ? edge_slope_memory.data() : nullptr;
  A* colours = out_lab ? colour_memory.data() : nullptr;
  A* contrast_slopes = out_lab ? contrast_slope_memory.data() : nullptr;
  launch_patch_means(data_of<T>(colour), data_of<T>(gx), data_of<T>(gy), edges, colours, grid, stream);
  patch_slopes_kernel<<<grid_size(patches, kCosineThreads), kCosineThreads, 0, stream>>>(
      grad, edges, colours, edge_slopes, contrast_slopes, grid, A(weight.edges), A(weight.contrast));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  dispatch_patch(grid, [&](auto warps, unsigned blocks) {
    pixels_grad_kernel<warps.value><<<blocks, kCosineThreads, 0, stream>>>(
        data_of<T>(gx), data_of<T>(gy), colours, edge_slopes, contrast_slopes, out_lab, out_x, out_y, grid);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> compute_salience_grad_cuda(const Tensor& grad, const Tensor& features,
                                                                      const Tensor& lab, const Tensor& sobel_x,
                                                                      const Tensor& sobel_y, int64_t patch_size,
                                                                      std::vector<double> weights, bool need_features,
                                                                      bool need_lab, bool need_sobel_x,
                                                                      bool need_sobel_y) {
  check_compute_salience_grad(grad, features, lab, sobel_x, sobel_y, patch_size, weights);
  const CudaScope scope(features);
  const Tensor g = torch::stable::contiguous(grad);
  const auto like_or_nothing = [](const Tensor& tensor, bool needed) {
    return needed ? torch::stable::new_empty(tensor, tensor.sizes()) : torch::stable::new_empty(tensor, {0});
  };
  Tensor grad_features = like_or_nothing(features, need_features), grad_lab = like_or_nothing(lab, need_lab),
         grad_x = like_or_nothing(sobel_x, need_sobel_x), grad_y = like_or_nothing(sobel_y, need_sobel_y);
  if (g.numel() == 0) return {grad_features, grad_lab, grad_x, grad_y};
  const SalienceWeights weight(weights);
  dispatch_floating(features.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const auto output = [](Tensor& tensor, bool needed) {
      return needed ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
    };
    if (need_features)
      features_grad(data_of<T>(g), features, output(grad_features, true), accumulate_t<T>(weight.features),
                    scope.stream());
    if (need_lab || need_sobel_x || need_sobel_y)
      pixels_grad(data_of<T>(g), lab, sobel_x, sobel_y, output(grad_lab, need_lab), output(grad_x, need_sobel_x),
                  output(grad_y, need_sobel_y), PatchGrid(lab, patch_size), weight, scope.stream());
  });
  return {grad_features, grad_lab, grad_x, grad_y};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("compute_salience", TORCH_BOX(&compute_salience_cuda));
  m.impl("compute_salience_grad", TORCH_BOX(&compute_salience_grad_cuda));
}

}  // namespace arr_coc
