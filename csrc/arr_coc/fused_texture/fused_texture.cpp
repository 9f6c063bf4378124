#include "arr_coc/fused_texture/fused_texture.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/colour.h"
#include "arr_coc/common/cpu.h"
#include "arr_coc/common/image_rows.h"

namespace arr_coc {
namespace {

// --- the loops over one row: contiguous, of the type computed in, and without branches ---

template <class A>
ARR_COC_EVERY_ISA void lab_row(Triple<const A*> rgb, Triple<A*> lab, int64_t width) {
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) {
    const Triple<A> pixel = lab_of<CpuCurves<A>>(rgb.first[x], rgb.second[x], rgb.third[x]);
    lab.first[x] = pixel.first;
    lab.second[x] = pixel.second;
    lab.third[x] = pixel.third;
  }
}

template <class A>
ARR_COC_EVERY_ISA void lab_gradient_row(Triple<const A*> rgb, Triple<const A*> grad, Triple<A*> out, int64_t width) {
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) {
    const Triple<A> pixel = lab_gradient<CpuCurves<A>>(rgb.first[x], rgb.second[x], rgb.third[x],
                                                       Triple<A>{grad.first[x], grad.second[x], grad.third[x]});
    out.first[x] = pixel.first;
    out.second[x] = pixel.second;
    out.third[x] = pixel.third;
  }
}

template <class A>
ARR_COC_EVERY_ISA void add_luma_gradient_row(const A* grad, Triple<A*> out, int64_t width) {
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) {
    out.first[x] += A(kLumaR) * grad[x];
    out.second[x] += A(kLumaG) * grad[x];
    out.third[x] += A(kLumaB) * grad[x];
  }
}

// The rows above, at and below, each with one value more at both ends: `row[x]` is left of pixel x.
template <class A>
ARR_COC_EVERY_ISA void sobel_row(Triple<const A*> rows, Triple<A*> sobel, int64_t width) {
  const A *up = rows.first, *at = rows.second, *down = rows.third;
  A *sobel_x = sobel.first, *sobel_y = sobel.second;
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) {
    sobel_x[x] = ((up[x + 2] - up[x]) + 2 * (at[x + 2] - at[x]) + (down[x + 2] - down[x])) * A(0.125);
    sobel_y[x] = ((down[x] - up[x]) + 2 * (down[x + 1] - up[x + 1]) + (down[x + 2] - up[x + 2])) * A(0.125);
  }
}

// The adjoint of sobel_row. See SobelGrad below for the ends, and for the signs of the rows of grad_y.
template <class A>
ARR_COC_EVERY_ISA void sobel_gradient_row(Triple<const A*> grad_x, Triple<const A*> grad_y, A sign_up, A sign_down,
                                          A* out, int64_t width) {
  const A *up = grad_x.first, *at = grad_x.second, *down = grad_x.third, *above = grad_y.first, *below = grad_y.third;
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) {
    const A from_x = (up[x] - up[x + 2]) + 2 * (at[x] - at[x + 2]) + (down[x] - down[x + 2]);
    const A from_y = sign_up * (above[x] + 2 * above[x + 1] + above[x + 2]) -
                     sign_down * (below[x] + 2 * below[x + 1] + below[x + 2]);
    out[x] = (from_x + from_y) * A(0.125);
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const FusedTexture<T>& call) {
  using A = accumulate_t<T>;
  const int64_t height = call.height, width = call.width, plane = height * width;
  parallel_rows(call.batch * height, width * 16, [&](int64_t begin, int64_t end) {
    Rows<T> in(width), out(width);
    RowRing<A> luma(width);
    slide_over_rows(
        begin, end, height,
        [&](int64_t b, int64_t y) {
          luma_row(in.load(planes(call.rgb + 3 * b * plane + y * width, plane)), luma.row(y) + 1, width);
          luma.close(y, 1);
        },
        [&](int64_t b, int64_t y) {
          const int64_t colour = 3 * b * plane + y * width, grey = b * plane + y * width;
          const Triple<T*> lab_rows = planes(call.lab + colour, plane);
          lab_row(in.load(planes(call.rgb + colour, plane)), out.staging(lab_rows), width);
          out.store(lab_rows);
          const Triple<T*> sobel_rows{call.sobel_x + grey, call.sobel_y + grey, nullptr};
          sobel_row(luma.around(y, height), out.staging(sobel_rows), width);
          out.store(sobel_rows);
        });
  });
}

template <class T>
void run(const Cpu&, const LabToRgbGrad<T>& call) {
  const int64_t height = call.height, width = call.width, plane = height * width;
  parallel_rows(call.batch * height, width * 16, [&](int64_t begin, int64_t end) {
    Rows<T> colour_rows(width), grad_rows(width), out_rows(width);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row / height * 3 * plane + row % height * width;
      const Triple<T*> out_planes = planes(call.out + at, plane);
      const auto staged = out_rows.staging(out_planes);
      lab_gradient_row(colour_rows.load(planes(call.rgb + at, plane)),
                       grad_rows.load(planes(call.grad_lab + at, plane)), staged, width);
      if (call.grad_luma)
        add_luma_gradient_row(grad_rows.load({call.grad_luma + row * width, nullptr, nullptr}).first, staged, width);
      out_rows.store(out_planes);
    }
  });
}

// The adjoint of a repeated border: along a smoothed axis ([1 2 1], its own transpose) the gradient is continued by its
// end value, along a differenced axis ([-1 0 1]) by minus its end value.
template <class T>
void run(const Cpu&, const SobelGrad<T>& call) {
  using A = accumulate_t<T>;
  const int64_t height = call.height, width = call.width;
  parallel_rows(call.batch * height, width * 4, [&](int64_t begin, int64_t end) {
    Rows<T> staged(width);
    RowRing<A> x_rows(width), y_rows(width);
    slide_over_rows(
        begin, end, height,
        [&](int64_t b, int64_t y) {
          const int64_t at = (b * height + y) * width;
          widen(call.grad_x + at, x_rows.row(y) + 1, width);
          widen(call.grad_y + at, y_rows.row(y) + 1, width);
          x_rows.close(y, -1);
          y_rows.close(y, 1);
        },
        [&](int64_t b, int64_t y) {
          const Triple<T*> rows{call.out + (b * height + y) * width, nullptr, nullptr};
          sobel_gradient_row(x_rows.around(y, height), y_rows.around(y, height), A(y > 0 ? 1 : -1),
                             A(y < height - 1 ? 1 : -1), staged.staging(rows).first, width);
          staged.store(rows);
        });
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("fused_texture(Tensor rgb) -> (Tensor lab, Tensor sobel_x, Tensor sobel_y)");
  m.def("lab_to_rgb_grad(Tensor rgb, Tensor grad_lab, Tensor? grad_luma=None) -> Tensor");
  m.def("sobel_grad(Tensor grad_x, Tensor grad_y) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("fused_texture", TORCH_BOX(&fused_texture<Cpu>));
  m.impl("lab_to_rgb_grad", TORCH_BOX(&lab_to_rgb_grad<Cpu>));
  m.impl("sobel_grad", TORCH_BOX(&sobel_grad<Cpu>));
}

}  // namespace arr_coc
