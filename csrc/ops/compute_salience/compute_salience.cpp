#include "ops/compute_salience/compute_salience.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/cosine.h"

namespace arr_coc {
namespace {

// Calls f(item, sample, n) for each patch n of each sample, item = sample N + n.
template <class F>
void parallel_patches(const PatchGrid& grid, int64_t cost, const F& f) {
  parallel_rows(grid.batch * grid.count(), cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) f(item, item / grid.count(), item % grid.count());
  });
}

// [B, N]: mean over the patch of sqrt(gx^2 + gy^2 + floor).
template <class A, class T>
std::vector<A> mean_edges(const T* sobel_x, const T* sobel_y, const PatchGrid& grid) {
  const int64_t patch = grid.patch;
  std::vector<A> means(grid.batch * grid.count());
  parallel_patches(grid, patch * patch * 8, [&](int64_t item, int64_t sample, int64_t n) {
    A total = 0;
    for (int64_t y = 0; y < patch; ++y) {
      const int64_t at = sample * grid.plane + grid.corner(n) + y * grid.width;
      const T *gx = sobel_x + at, *gy = sobel_y + at;
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t x = 0; x < patch; ++x) sum += std::sqrt(A(gx[x]) * A(gx[x]) + A(gy[x]) * A(gy[x]) + A(kEdgeFloor));
      total += sum;
    }
    means[item] = total / A(patch * patch);
  });
  return means;
}

// [B, N, 3]: mean over the patch of L, a and b.
template <class A, class T>
std::vector<A> mean_colours(const T* lab, const PatchGrid& grid) {
  const int64_t patch = grid.patch;
  std::vector<A> means(grid.batch * grid.count() * 3);
  parallel_patches(grid, patch * patch * 4, [&](int64_t item, int64_t sample, int64_t n) {
    for (int64_t c = 0; c < 3; ++c) {
      A total = 0;
      for (int64_t y = 0; y < patch; ++y) {
        const T* row = lab + (sample * 3 + c) * grid.plane + grid.corner(n) + y * grid.width;
        A sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t x = 0; x < patch; ++x) sum += A(row[x]);
        total += sum;
      }
      means[item * 3 + c] = total / A(patch * patch);
    }
  });
  return means;
}

// The samples' mean feature vectors [B, D], as unit vectors and norms.
template <class A, class T>
UnitRows<A> mean_features(const T* features, int64_t batch, int64_t count, int64_t width) {
  std::vector<A> means = column_sums<A>(features, nullptr, nullptr, batch, count, width, 1);
  for (A& mean : means) mean /= A(count);
  return unit_rows<A>(means.data(), nullptr, batch, width);
}

Tensor compute_salience_cpu(const Tensor& features, const Tensor& lab, const Tensor& sobel_x, const Tensor& sobel_y,
                            int64_t patch_size, std::vector<double> weights) {
  check_compute_salience(features, lab, sobel_x, sobel_y, patch_size, weights);
  const Tensor x = torch::stable::contiguous(features), colour = torch::stable::contiguous(lab),
               gx = torch::stable::contiguous(sobel_x), gy = torch::stable::contiguous(sobel_y);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2);
  Tensor salience = torch::stable::new_empty(x, {batch, count});
  if (batch * count == 0) return salience;
  const PatchGrid grid(lab, patch_size);
  const SalienceWeights weight(weights);
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    T* out = static_cast<T*>(salience.mutable_data_ptr());
    const std::vector<A> edges =
        mean_edges<A>(static_cast<const T*>(gx.const_data_ptr()), static_cast<const T*>(gy.const_data_ptr()), grid);
    const std::vector<A> colours = mean_colours<A>(static_cast<const T*>(colour.const_data_ptr()), grid);
    const UnitRows<A> mean = mean_features<A>(in, batch, count, width);
    parallel_rows(batch * count, width * 2 + 64, [&](int64_t begin, int64_t end) {
      std::vector<A> buffer;
      for (int64_t item = begin; item < end; ++item) {
        const int64_t sample = item / count;
        const A* row = accumulated(in + item * width, width, buffer);
        const A inverse = inverse_norm(std::sqrt(dot(row, row, width)));
        const A cosine = dot(row, mean.unit.data() + sample * width, width) * inverse;
        const A distance = Contrast<A>(colours.data() + sample * count * 3, grid, item % count).distance;
        const A edge = edges[item] / (edges[item] + A(kEdgeHalf)), contrast = distance / (distance + A(kContrastHalf));
        out[item] = T(A(weight.edges) * edge + A(weight.contrast) * contrast + A(weight.features) * (1 - cosine) / 2);
      }
    });
  });
  return salience;
}

// With u the mean's unit vector, c the cosine and h = -g w_F / 2: d f_n = h (u - c f / |f|) / |f| + d mean / N; the
// mean's unit vector gets the sum over n of h f / |f|.
template <class T, class A = accumulate_t<T>>
void features_grad(const T* grad, const T* features, T* out, int64_t batch, int64_t count, int64_t width, A weight) {
  const UnitRows<A> mean = mean_features<A>(features, batch, count, width);
  std::vector<A> factor(batch * count), along(batch * count);
  parallel_rows(batch * count, width * 2, [&](int64_t begin, int64_t end) {
    std::vector<A> buffer;
    for (int64_t item = begin; item < end; ++item) {
      const A* row = accumulated(features + item * width, width, buffer);
      const A norm = std::sqrt(dot(row, row, width)), inverse = inverse_norm(norm);
      const A cosine = dot(row, mean.unit.data() + item / count * width, width) * inverse;
      factor[item] = -A(grad[item]) * weight / 2 * inverse;
      along[item] = norm_passes(norm) * cosine * inverse;
    }
  });
  std::vector<A> of_mean = column_sums(features, factor.data(), nullptr, batch, count, width, 1);
  for (int64_t sample = 0; sample < batch; ++sample) {
    A* upstream = of_mean.data() + sample * width;
    through_unit(upstream, mean.unit.data() + sample * width, mean.norm[sample], 1 / A(count), width, upstream);
  }
  parallel_rows(batch * count, width * 4, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const A *unit = mean.unit.data() + item / count * width, *shared = of_mean.data() + item / count * width;
      for (int64_t d = 0; d < width; ++d) {
        const int64_t at = item * width + d;
        out[at] = T(factor[item] * (unit[d] - along[item] * A(features[at])) + shared[d]);
      }
    }
  });
}

// The gradient of a patch's mean colour, shared by its pixels.
template <class T, class A = accumulate_t<T>>
void lab_grad(const T* grad, const T* lab, T* out, const PatchGrid& grid, A weight) {
  const int64_t count = grid.count(), patch = grid.patch;
  const std::vector<A> colours = mean_colours<A>(lab, grid);
  std::vector<A> slopes(grid.batch * count);
  parallel_patches(grid, 64, [&](int64_t item, int64_t sample, int64_t n) {
    const Contrast<A> contrast(colours.data() + sample * count * 3, grid, n);
    slopes[item] = A(grad[item]) * weight * contrast.slope() / A(patch * patch);
  });
  parallel_patches(grid, patch * patch * 3 + 64, [&](int64_t, int64_t sample, int64_t n) {
    A gradient[3];
    colour_gradient(colours.data() + sample * count * 3, slopes.data() + sample * count, grid, n, gradient);
    for (int64_t c = 0; c < 3; ++c)
      for (int64_t y = 0; y < patch; ++y)
        std::fill_n(out + (sample * 3 + c) * grid.plane + grid.corner(n) + y * grid.width, patch, T(gradient[c]));
  });
}

// d E / d m = 0.1 / (m + 0.1)^2, and a pixel's magnitude moves by gx / magnitude. A null output is not needed.
template <class T, class A = accumulate_t<T>>
void sobel_grad(const T* grad, const T* sobel_x, const T* sobel_y, T* out_x, T* out_y, const PatchGrid& grid,
                A weight) {
  const int64_t patch = grid.patch;
  const std::vector<A> edges = mean_edges<A>(sobel_x, sobel_y, grid);
  parallel_patches(grid, patch * patch * 8, [&](int64_t item, int64_t sample, int64_t n) {
    const A shifted = edges[item] + A(kEdgeHalf);
    const A slope = A(grad[item]) * weight * A(kEdgeHalf) / (shifted * shifted) / A(patch * patch);
    for (int64_t y = 0; y < patch; ++y) {
      const int64_t first = sample * grid.plane + grid.corner(n) + y * grid.width;
      for (int64_t at = first; at < first + patch; ++at) {
        const A gx = A(sobel_x[at]), gy = A(sobel_y[at]), scale = slope / std::sqrt(gx * gx + gy * gy + A(kEdgeFloor));
        if (out_x) out_x[at] = T(scale * gx);
        if (out_y) out_y[at] = T(scale * gy);
      }
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> compute_salience_grad_cpu(const Tensor& grad, const Tensor& features,
                                                                     const Tensor& lab, const Tensor& sobel_x,
                                                                     const Tensor& sobel_y, int64_t patch_size,
                                                                     std::vector<double> weights, bool need_features,
                                                                     bool need_lab, bool need_sobel_x,
                                                                     bool need_sobel_y) {
  check_compute_salience_grad(grad, features, lab, sobel_x, sobel_y, patch_size, weights);
  const Tensor g = torch::stable::contiguous(grad);
  const auto like_or_nothing = [](const Tensor& tensor, bool needed) {
    return needed ? torch::stable::new_empty(tensor, tensor.sizes()) : torch::stable::new_empty(tensor, {0});
  };
  Tensor grad_features = like_or_nothing(features, need_features), grad_lab = like_or_nothing(lab, need_lab),
         grad_x = like_or_nothing(sobel_x, need_sobel_x), grad_y = like_or_nothing(sobel_y, need_sobel_y);
  if (g.numel() == 0) return {grad_features, grad_lab, grad_x, grad_y};
  const PatchGrid grid(lab, patch_size);
  const SalienceWeights weight(weights);
  dispatch_floating(features.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* upstream = static_cast<const T*>(g.const_data_ptr());
    if (need_features) {
      const Tensor x = torch::stable::contiguous(features);
      features_grad(upstream, static_cast<const T*>(x.const_data_ptr()),
                    static_cast<T*>(grad_features.mutable_data_ptr()), x.size(0), x.size(1), x.size(2),
                    A(weight.features));
    }
    if (need_lab) {
      const Tensor colour = torch::stable::contiguous(lab);
      lab_grad(upstream, static_cast<const T*>(colour.const_data_ptr()), static_cast<T*>(grad_lab.mutable_data_ptr()),
               grid, A(weight.contrast));
    }
    if (need_sobel_x || need_sobel_y) {
      const Tensor gx = torch::stable::contiguous(sobel_x), gy = torch::stable::contiguous(sobel_y);
      sobel_grad(upstream, static_cast<const T*>(gx.const_data_ptr()), static_cast<const T*>(gy.const_data_ptr()),
                 need_sobel_x ? static_cast<T*>(grad_x.mutable_data_ptr()) : nullptr,
                 need_sobel_y ? static_cast<T*>(grad_y.mutable_data_ptr()) : nullptr, grid, A(weight.edges));
    }
  });
  return {grad_features, grad_lab, grad_x, grad_y};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "compute_salience(Tensor features, Tensor lab, Tensor sobel_x, Tensor sobel_y, SymInt patch_size, "
      "float[3] weights=[0.5, 0.25, 0.25]) -> Tensor");
  m.def(
      "compute_salience_grad(Tensor grad, Tensor features, Tensor lab, Tensor sobel_x, Tensor sobel_y, "
      "SymInt patch_size, float[3] weights, bool need_features, bool need_lab, bool need_sobel_x, "
      "bool need_sobel_y) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("compute_salience", TORCH_BOX(&compute_salience_cpu));
  m.impl("compute_salience_grad", TORCH_BOX(&compute_salience_grad_cpu));
}

}  // namespace arr_coc
