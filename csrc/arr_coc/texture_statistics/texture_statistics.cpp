#include "arr_coc/texture_statistics/texture_statistics.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "arr_coc/common/image_rows.h"

namespace arr_coc {
namespace {

// The quantities summed over a patch, with one row of sums each.
template <class A>
struct Sums {
  A *lightness, *a, *b, *magnitude;
};

// Adds one row of pixels to the sums of its columns; `luma` is the rows above, at and below, as in RowRing.
template <class A>
ARR_COC_EVERY_ISA void add_row(Triple<const A*> rgb, Triple<const A*> luma, Sums<A> sums, int64_t width) {
  const A *up = luma.first, *at = luma.second, *down = luma.third;
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) {
    const Triple<A> pixel = lab_of<CpuCurves<A>>(rgb.first[x], rgb.second[x], rgb.third[x]);
    const A gx = ((up[x + 2] - up[x]) + 2 * (at[x + 2] - at[x]) + (down[x + 2] - down[x])) * A(0.125);
    const A gy = ((down[x] - up[x]) + 2 * (down[x + 1] - up[x + 1]) + (down[x + 2] - up[x + 2])) * A(0.125);
    sums.lightness[x] += pixel.first;
    sums.a[x] += pixel.second;
    sums.b[x] += pixel.third;
    sums.magnitude[x] += std::sqrt(gx * gx + gy * gy + A(kMagnitudeFloor));
  }
}

// The means of one row of patches, from the sums of its columns.
template <class A, class T>
void take_means(const A* sums, T* means, int64_t patches, int64_t patch_size) {
  for (int64_t n = 0; n < patches; ++n) {
    A sum = 0;
    for (int64_t x = n * patch_size; x < (n + 1) * patch_size; ++x) sum += sums[x];
    means[n] = T(sum / (A(patch_size) * A(patch_size)));
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const TextureStatistics<T>& call) {
  using A = accumulate_t<T>;
  const int64_t height = call.height, width = call.width, plane = height * width, patch_size = call.patch_size;
  const int64_t rows = height / patch_size, columns = width / patch_size, patches = rows * columns;
  // Rows of the batch's patches, one image's below the other's.
  parallel_rows(call.batch * rows, patch_size * width * 16, [&](int64_t begin, int64_t end) {
    Rows<T> in(width);
    RowRing<A> luma(width);
    std::vector<A> buffer(4 * width);
    const Sums<A> sums{&buffer[0], &buffer[width], &buffer[2 * width], &buffer[3 * width]};
    slide_over_rows(
        begin * patch_size, end * patch_size, height,
        [&](int64_t b, int64_t y) {
          luma_row(in.load(planes(call.rgb + 3 * b * plane + y * width, plane)), luma.row(y) + 1, width);
          luma.close(y, 1);
        },
        [&](int64_t b, int64_t y) {
          if (y % patch_size == 0) std::fill(buffer.begin(), buffer.end(), A(0));
          add_row(in.load(planes(call.rgb + 3 * b * plane + y * width, plane)), luma.around(y, height), sums, width);
          if ((y + 1) % patch_size != 0) return;
          const int64_t row = y / patch_size;
          T* colour = call.colours + (3 * b * rows + row) * columns;
          take_means(sums.lightness, colour, columns, patch_size);
          take_means(sums.a, colour + patches, columns, patch_size);
          take_means(sums.b, colour + 2 * patches, columns, patch_size);
          take_means(sums.magnitude, call.edges + (b * rows + row) * columns, columns, patch_size);
        });
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("texture_statistics(Tensor rgb, SymInt patch_size) -> (Tensor colours, Tensor edges)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("texture_statistics", TORCH_BOX(&texture_statistics<Cpu>)); }

}  // namespace arr_coc
