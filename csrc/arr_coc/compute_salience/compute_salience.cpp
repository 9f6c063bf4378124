#include "arr_coc/compute_salience/compute_salience.h"

#include <torch/csrc/stable/library.h>

#include <cstdlib>

#include "arr_coc/common/cosine.h"
#include "arr_coc/common/stream.h"

namespace arr_coc {
namespace {

// --- loops along a row: contiguous and without branches -------------------------------------------------------------

template <class A>
ARR_COC_EVERY_ISA void magnitude_row(const A* gx, const A* gy, A* magnitudes, int64_t width) {
  prefetch_behind(gx, width);
  prefetch_behind(gy, width);
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) magnitudes[x] = std::sqrt(gx[x] * gx[x] + gy[x] * gy[x] + A(kEdgeFloor));
}

// The gradients of pixels' (gx, gy) through their magnitudes. A null output is not computed.
template <class A>
ARR_COC_EVERY_ISA void direction_row(const A* slopes, const A* gx, const A* gy, A* out_x, A* out_y, int64_t width) {
  prefetch_behind(gx, width);
  prefetch_behind(gy, width);
  if (out_x && out_y) {
#pragma omp simd
    for (int64_t x = 0; x < width; ++x) {
      const A scale = slopes[x] / std::sqrt(gx[x] * gx[x] + gy[x] * gy[x] + A(kEdgeFloor));
      out_x[x] = scale * gx[x];
      out_y[x] = scale * gy[x];
    }
    return;
  }
  const A *in = out_x ? gx : gy, *other = out_x ? gy : gx;
  A* out = out_x ? out_x : out_y;
#pragma omp simd
  for (int64_t x = 0; x < width; ++x)
    out[x] = slopes[x] / std::sqrt(in[x] * in[x] + other[x] * other[x] + A(kEdgeFloor)) * in[x];
}

// Computes means[j] from patch j's column sums.
template <class A>
ARR_COC_EVERY_ISA void means_of_columns(const A* columns, int64_t patches, int64_t patch, A* means) {
  for (int64_t j = 0; j < patches; ++j) {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t x = 0; x < patch; ++x) sum += columns[j * patch + x];
    means[j] = sum / A(patch * patch);
  }
}

// sums[j] += |colours[j] - others[j]| for colours whose planes are `plane` apart.
template <class A>
ARR_COC_EVERY_ISA void add_distances(const A* colours, const A* others, int64_t plane, A* sums, int64_t size) {
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) {
    const A l = colours[j] - others[j], a = colours[plane + j] - others[plane + j],
            b = colours[2 * plane + j] - others[2 * plane + j];
    sums[j] += std::sqrt(l * l + a * a + b * b);
  }
}

// The gradient of both contrasts that contain a distance. Equal colours contribute nothing.
template <class A>
ARR_COC_EVERY_ISA void add_directions(const A* colours, const A* others, int64_t plane, const A* slopes,
                                      const A* other_slopes, A* gradients, int64_t gradient_plane, int64_t size) {
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) {
    const A l = colours[j] - others[j], a = colours[plane + j] - others[plane + j],
            b = colours[2 * plane + j] - others[2 * plane + j];
    const A distance = std::sqrt(l * l + a * a + b * b), apart = distance == 0 ? A(1) : distance;
    const A slope = slopes[j] + other_slopes[j];
    gradients[j] += distance == 0 ? A(0) : slope * (l / apart);
    gradients[gradient_plane + j] += distance == 0 ? A(0) : slope * (a / apart);
    gradients[2 * gradient_plane + j] += distance == 0 ? A(0) : slope * (b / apart);
  }
}

template <class A>
ARR_COC_EVERY_ISA void features_gradient_row(const A* x, const A* unit, const A* shared, A factor, A along, A* out,
                                             int64_t width) {
#pragma omp simd
  for (int64_t d = 0; d < width; ++d) out[d] = factor * (unit[d] - along * x[d]) + shared[d];
}

// --- bands: rows of patches ------------------------------------------------------------------------------------------

// Calls f(begin, end) for bands of all samples, numbered one after the other; band b starts at pixel b patch width of
// an image with one channel.
template <class F>
void parallel_bands(const PatchGrid& grid, int64_t pixel_cost, const F& f) {
  parallel_rows(grid.batch * grid.rows, grid.patch * grid.width * pixel_cost, f);
}

// The address of a statistic of a band's first patch.
template <class A>
A* of_band(A* patches, const PatchGrid& grid, int64_t band, int64_t statistic) {
  return patches + (band / grid.rows * kStatistics + statistic) * grid.count() + band % grid.rows * grid.columns;
}

// Writes the patches' mean edge strength, the mean of sqrt(gx^2 + gy^2 + floor), to `patches` [B, kStatistics, N].
template <class T, class A = accumulate_t<T>>
void mean_edges(const T* sobel_x, const T* sobel_y, const PatchGrid& grid, A* patches) {
  parallel_bands(grid, 2, [&](int64_t begin, int64_t end) {
    std::vector<A> magnitudes(grid.width), columns(grid.width), wide_x, wide_y;
    for (int64_t band = begin; band < end; ++band) {
      std::fill(columns.begin(), columns.end(), A(0));
      for (int64_t y = 0; y < grid.patch; ++y) {
        const int64_t at = (band * grid.patch + y) * grid.width;
        magnitude_row(accumulated(sobel_x + at, grid.width, wide_x), accumulated(sobel_y + at, grid.width, wide_y),
                      magnitudes.data(), grid.width);
        add_scaled(magnitudes.data(), A(1), columns.data(), grid.width);
      }
      means_of_columns(columns.data(), grid.columns, grid.patch, of_band(patches, grid, band, kEdges));
    }
  });
}

// Writes the patches' means of L, a and b to `patches`.
template <class T, class A = accumulate_t<T>>
void mean_colours(const T* lab, const PatchGrid& grid, A* patches) {
  parallel_bands(grid, 2, [&](int64_t begin, int64_t end) {
    std::vector<A> columns(grid.width), buffer;
    for (int64_t band = begin; band < end; ++band) {
      const int64_t sample = band / grid.rows, row = band % grid.rows;
      for (int64_t c = 0; c < 3; ++c) {
        std::fill(columns.begin(), columns.end(), A(0));
        const T* first = lab + (sample * 3 + c) * grid.plane + row * grid.patch * grid.width;
        for (int64_t y = 0; y < grid.patch; ++y)
          add_scaled(accumulated(first + y * grid.width, grid.width, buffer), A(1), columns.data(), grid.width);
        means_of_columns(columns.data(), grid.columns, grid.patch, of_band(patches, grid, band, kColours + c));
      }
    }
  });
}

// Calls f(j, at, other, size) for each of the up to 8 directions to a neighbour: patches `at` and on of a row, from
// column j on, have patches `other` and on in that direction.
template <class F>
void for_neighbour_runs(const PatchGrid& grid, int64_t row, const F& f) {
  for (int64_t i = std::max<int64_t>(row - 1, 0); i <= std::min(row + 1, grid.rows - 1); ++i) {
    for (int64_t dx = -1; dx <= 1; ++dx) {
      const int64_t j = dx < 0, size = grid.columns - std::abs(dx);
      if (i != row || dx != 0) f(j, row * grid.columns + j, i * grid.columns + j + dx, size);
    }
  }
}

// The number of neighbours of patch `column` of a row, at least 1.
template <class A>
A neighbours_of(const PatchGrid& grid, int64_t row, int64_t column) {
  const int64_t rows = std::min(row + 1, grid.rows - 1) - std::max<int64_t>(row - 1, 0) + 1,
                columns = std::min(column + 1, grid.columns - 1) - std::max<int64_t>(column - 1, 0) + 1;
  return A(std::max<int64_t>(rows * columns - 1, 1));
}

// Writes the mean distance of each patch's colour from its neighbours' to `patches`.
template <class A>
void mean_distances(const PatchGrid& grid, A* patches) {
  parallel_rows(grid.batch * grid.rows, grid.columns * 32, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) {
      const int64_t row = band % grid.rows;
      const A* of_sample = patches + (band / grid.rows * kStatistics + kColours) * grid.count();
      A* sums = of_band(patches, grid, band, kDistances);
      std::fill_n(sums, grid.columns, A(0));
      for_neighbour_runs(grid, row, [&](int64_t j, int64_t at, int64_t other, int64_t size) {
        add_distances(of_sample + at, of_sample + other, grid.count(), sums + j, size);
      });
      for (int64_t j = 0; j < grid.columns; ++j) sums[j] /= neighbours_of<A>(grid, row, j);
    }
  });
}

// --- the operators ---------------------------------------------------------------------------------------------------

constexpr int64_t kCached = 2 << 20;  // bytes

// With u the mean's unit vector, c the cosine and h = -g w_F / 2: d f_n = h (u - c f / |f|) / |f| + d mean / N; the
// mean's unit vector gets the sum over n of h f / |f|.
template <class T, class A = accumulate_t<T>>
void features_grad(const T* grad, const T* features, const A* unit, const A* norm, const A* patches, T* out,
                   int64_t batch, int64_t count, int64_t width, A weight, int64_t written) {
  std::vector<A> factor(batch * count), along(batch * count);
  for (int64_t item = 0; item < batch * count; ++item) {
    const A* of_patch = patches + item / count * kStatistics * count + item % count;
    const A length = of_patch[kNorms * count], inverse = inverse_norm(length);
    factor[item] = -load(grad[item]) * weight / 2 * inverse;
    along[item] = norm_passes(length) * of_patch[kCosines * count] * inverse;
  }
  std::vector<A> of_mean =
      column_sums<A>(features, [&](int64_t item, const A*) { return factor[item]; }, nullptr, batch, count, width, 1);
  for (int64_t sample = 0; sample < batch; ++sample) {
    A* upstream = of_mean.data() + sample * width;
    through_unit(upstream, unit + sample * width, norm[sample], 1 / A(count), width, upstream);
  }
  parallel_rows(batch * count, width * 4, [&](int64_t begin, int64_t end) {
    std::vector<A> buffer;
    StagedRow<T> staged(width, written);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t of_sample = item / count * width;
      T* out_row = out + item * width;
      features_gradient_row(accumulated(features + item * width, width, buffer), unit + of_sample,
                            of_mean.data() + of_sample, factor[item], along[item], staged.at(out_row), width);
      staged.store_to(out_row);
    }
  });
}

// The gradient of a patch's mean colour, shared by its pixels.
template <class T, class A = accumulate_t<T>>
void lab_grad(const T* grad, const A* patches, T* out, const PatchGrid& grid, A weight, int64_t written) {
  const int64_t count = grid.count(), patch = grid.patch;
  std::vector<A> slopes(grid.batch * count);
  parallel_rows(grid.batch * count, 8, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item % count;
      const A shifted = patches[(item / count * kStatistics + kDistances) * count + n] + A(kContrastHalf),
              neighbours = neighbours_of<A>(grid, n / grid.columns, n % grid.columns);
      slopes[item] = load(grad[item]) * weight * A(kContrastHalf) / (shifted * shifted) / neighbours / A(patch * patch);
    }
  });
  parallel_bands(grid, 2, [&](int64_t begin, int64_t end) {
    const RowStream stream(written);
    std::vector<T> rows(3 * grid.width);
    std::vector<A> gradients(3 * grid.columns);
    for (int64_t band = begin; band < end; ++band) {
      const int64_t sample = band / grid.rows, row = band % grid.rows;
      const A *of_sample = patches + (sample * kStatistics + kColours) * count, *slope = slopes.data() + sample * count;
      std::fill(gradients.begin(), gradients.end(), A(0));
      for_neighbour_runs(grid, row, [&](int64_t j, int64_t at, int64_t other, int64_t size) {
        add_directions(of_sample + at, of_sample + other, count, slope + at, slope + other, gradients.data() + j,
                       grid.columns, size);
      });
      for (int64_t c = 0; c < 3; ++c)
        for (int64_t j = 0; j < grid.columns; ++j)
          std::fill_n(rows.data() + c * grid.width + j * patch, patch, store<T>(gradients[c * grid.columns + j]));
      for (int64_t c = 0; c < 3; ++c)
        for (int64_t y = 0; y < patch; ++y)
          stream.copy(rows.data() + c * grid.width, grid.width,
                      out + (sample * 3 + c) * grid.plane + (row * patch + y) * grid.width);
    }
  });
}

// d E / d m = 0.1 / (m + 0.1)^2, and the slope of a pixel's magnitude is gx / magnitude. A null output is not computed.
template <class T, class A = accumulate_t<T>>
void sobel_grad(const T* grad, const T* sobel_x, const T* sobel_y, const A* patches, T* out_x, T* out_y,
                const PatchGrid& grid, A weight, int64_t written) {
  const int64_t patch = grid.patch, width = grid.width;
  parallel_bands(grid, 4, [&](int64_t begin, int64_t end) {
    StagedRow<T> staged_x(width, written), staged_y(width, written);
    std::vector<A> slopes(width), wide_x, wide_y;
    for (int64_t band = begin; band < end; ++band) {
      const A* edges = of_band(patches, grid, band, kEdges);
      for (int64_t j = 0; j < grid.columns; ++j) {
        const A shifted = edges[j] + A(kEdgeHalf), upstream = load(grad[band * grid.columns + j]);
        std::fill_n(slopes.data() + j * patch, patch,
                    upstream * weight * A(kEdgeHalf) / (shifted * shifted) / A(patch * patch));
      }
      for (int64_t y = 0; y < patch; ++y) {
        const int64_t at = (band * patch + y) * width;
        direction_row(slopes.data(), accumulated(sobel_x + at, width, wide_x), accumulated(sobel_y + at, width, wide_y),
                      out_x ? staged_x.at(out_x + at) : nullptr, out_y ? staged_y.at(out_y + at) : nullptr, width);
        if (out_x) staged_x.store_to(out_x + at);
        if (out_y) staged_y.store_to(out_y + at);
      }
    }
  });
}

}  // namespace

template <class T>
void run(const Cpu&, const Salience<T>& call) {
  using A = accumulate_t<T>;
  const int64_t batch = call.grid.batch, count = call.grid.count(), width = call.width;
  const SalienceWeights& weights = call.weights;
  mean_edges(call.sobel_x, call.sobel_y, call.grid, call.patches);
  mean_colours(call.lab, call.grid, call.patches);
  mean_distances(call.grid, call.patches);
  const auto one = [](int64_t, const A*) { return A(1); };
  std::vector<A> means = column_sums<A>(call.features, one, nullptr, batch, count, width, 1);
  for (A& mean : means) mean /= A(count);
  const UnitRows<A> of_means = unit_rows<A>(means.data(), nullptr, batch, width);
  std::copy(of_means.unit.begin(), of_means.unit.end(), call.mean_unit);
  std::copy(of_means.norm.begin(), of_means.norm.end(), call.mean_norm);
  parallel_rows(batch * count, width * 2 + 64, [&](int64_t begin, int64_t end) {
    std::vector<A> buffer;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t sample = item / count;
      A* of_patch = call.patches + sample * kStatistics * count + item % count;
      const A* row = accumulated(call.features + item * width, width, buffer);
      const Products<A> both = products(row, call.mean_unit + sample * width, width);
      const A norm = std::sqrt(both.square), cosine = both.dot * inverse_norm(norm);
      of_patch[kNorms * count] = norm, of_patch[kCosines * count] = cosine;
      const A strength = of_patch[kEdges * count], edge = strength / (strength + A(kEdgeHalf)),
              distance = of_patch[kDistances * count], contrast = distance / (distance + A(kContrastHalf));
      call.out[item] =
          store<T>(A(weights.edges) * edge + A(weights.contrast) * contrast + A(weights.features) * (1 - cosine) / 2);
    }
  });
}

template <class T>
void run(const Cpu&, const SalienceGrad<T>& call) {
  using A = accumulate_t<T>;
  const PatchGrid& grid = call.grid;
  const int64_t batch = grid.batch, count = grid.count(), width = call.width, sample = count * width;
  const int64_t pixels = (call.grad_lab ? 3 : 0) + (call.grad_x ? 1 : 0) + (call.grad_y ? 1 : 0);
  const int64_t written = batch * ((call.grad_features ? sample : 0) + pixels * grid.plane) * int64_t(sizeof(T));
  if (call.grad_features) {
    // As many samples at a time as the caches keep from one pass to the next.
    const int64_t group = std::max<int64_t>(1, kCached / (sample * int64_t(sizeof(T))));
    for (int64_t first = 0; first < batch; first += group)
      features_grad(call.grad + first * count, call.features + first * sample, call.mean_unit + first * width,
                    call.mean_norm + first, call.patches + first * kStatistics * count,
                    call.grad_features + first * sample, std::min(group, batch - first), count, width,
                    A(call.weights.features), written);
  }
  if (call.grad_lab) lab_grad(call.grad, call.patches, call.grad_lab, grid, A(call.weights.contrast), written);
  if (call.grad_x || call.grad_y)
    sobel_grad(call.grad, call.sobel_x, call.sobel_y, call.patches, call.grad_x, call.grad_y, grid,
               A(call.weights.edges), written);
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "compute_salience(Tensor features, Tensor lab, Tensor sobel_x, Tensor sobel_y, SymInt patch_size, "
      "float[3] weights=[0.5, 0.25, 0.25]) -> Tensor");
  m.def(
      "compute_salience_forward(Tensor features, Tensor lab, Tensor sobel_x, Tensor sobel_y, SymInt patch_size, "
      "float[3] weights=[0.5, 0.25, 0.25]) -> (Tensor salience, Tensor mean_unit, Tensor mean_norm, Tensor patches)");
  m.def(
      "compute_salience_grad(Tensor grad, Tensor features, Tensor sobel_x, Tensor sobel_y, Tensor mean_unit, "
      "Tensor mean_norm, Tensor patches, SymInt patch_size, float[3] weights, bool need_features, bool need_lab, "
      "bool need_sobel_x, bool need_sobel_y) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("compute_salience", TORCH_BOX(&compute_salience<Cpu>));
  m.impl("compute_salience_forward", TORCH_BOX(&compute_salience_forward<Cpu>));
  m.impl("compute_salience_grad", TORCH_BOX(&compute_salience_grad<Cpu>));
}

}  // namespace arr_coc
