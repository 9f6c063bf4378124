#include "ops/fused_texture/fused_texture.h"

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "common/colour.h"
#include "common/cpu.h"

namespace arr_coc {
namespace {

// --- the loops over one row: contiguous, of the type computed in, and without branches
// --------------------------------

template <class T, class A>
ARR_COC_EVERY_ISA void widen(const T* in, A* out, int64_t width) {
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) out[x] = A(in[x]);
}

template <class A, class T>
ARR_COC_EVERY_ISA void narrow(const A* in, T* out, int64_t width) {
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) out[x] = T(in[x]);
}

template <class A>
ARR_COC_EVERY_ISA void luma_row(Triple<const A*> rgb, A* luma, int64_t width) {
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) luma[x] = luma_of<CpuCurves<A>>(rgb.first[x], rgb.second[x], rgb.third[x]);
}

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

// The adjoint of sobel_row. See sobel_grad_rows for the ends, and for the signs of the rows of grad_y.
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

// --- rows of any dtype
// --------------------------------------------------------------------------------------------------

// The same row of three planes.
template <class T>
Triple<T*> planes(T* first, int64_t plane) {
  return {first, first + plane, first + 2 * plane};
}

// Up to three rows in the type computed in. Where that is the tensor's own type they are the tensor's rows, and nothing
// is copied. A null row is left out.
template <class T>
class Rows {
 public:
  using A = accumulate_t<T>;
  explicit Rows(int64_t width) : width_(width), buffer_(kCopies ? 3 * width : 0) {}

  Triple<const A*> load(Triple<const T*> rows) {
    if constexpr (kCopies) {
      const Triple<A*> copies = planes(buffer_.data(), width_);
      widen(rows.first, copies.first, width_);
      widen(rows.second, copies.second, width_);
      widen(rows.third, copies.third, width_);
      return {copies.first, copies.second, copies.third};
    } else {
      return rows;
    }
  }

  // Where to write what store() then brings to `rows`.
  Triple<A*> staging(Triple<T*> rows) {
    if constexpr (kCopies) {
      return planes(buffer_.data(), width_);
    } else {
      return rows;
    }
  }

  void store(Triple<T*> rows) {
    if constexpr (kCopies) {
      const Triple<A*> copies = planes(buffer_.data(), width_);
      if (rows.first) narrow(copies.first, rows.first, width_);
      if (rows.second) narrow(copies.second, rows.second, width_);
      if (rows.third) narrow(copies.third, rows.third, width_);
    }
  }

 private:
  static constexpr bool kCopies = !std::is_same_v<T, A>;
  int64_t width_;
  std::vector<A> buffer_;
};

// The last three rows of an image, each with one value more at both ends.
template <class A>
class RowRing {
 public:
  explicit RowRing(int64_t width) : width_(width), buffer_(3 * (width + 2)) {}
  A* row(int64_t y) { return buffer_.data() + y % 3 * (width_ + 2); }

  // The ends repeat their neighbour `edge` times.
  void close(int64_t y, A edge) {
    A* values = row(y);
    values[0] = edge * values[1];
    values[width_ + 1] = edge * values[width_];
  }

  // Rows y - 1, y and y + 1, kept inside the image.
  Triple<const A*> around(int64_t y, int64_t height) {
    return {row(std::max<int64_t>(y - 1, 0)), row(y), row(std::min(y + 1, height - 1))};
  }

 private:
  int64_t width_;
  std::vector<A> buffer_;
};

// For rows [begin, end) of the batch's images, one under the other: calls fill(b, y) for every row of image b that is
// within one row of the current one, in order and once, then f(b, y) for the current one.
template <class Fill, class F>
void slide_over_rows(int64_t begin, int64_t end, int64_t height, const Fill& fill, const F& f) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / height, y = row % height, last = std::min(y + 1, height - 1);
    for (int64_t fresh = row == begin || y == 0 ? std::max<int64_t>(y - 1, 0) : y + 1; fresh <= last; ++fresh)
      fill(b, fresh);
    f(b, y);
  }
}

// --- the operators
// ------------------------------------------------------------------------------------------------------

template <class T>
void texture_rows(const T* rgb, T* lab, T* sobel_x, T* sobel_y, int64_t height, int64_t width, int64_t begin,
                  int64_t end) {
  using A = accumulate_t<T>;
  const int64_t plane = height * width;
  Rows<T> in(width), out(width);
  RowRing<A> luma(width);
  slide_over_rows(
      begin, end, height,
      [&](int64_t b, int64_t y) {
        luma_row(in.load(planes(rgb + 3 * b * plane + y * width, plane)), luma.row(y) + 1, width);
        luma.close(y, 1);
      },
      [&](int64_t b, int64_t y) {
        const int64_t colour = 3 * b * plane + y * width, grey = b * plane + y * width;
        const Triple<T*> lab_rows = planes(lab + colour, plane);
        lab_row(in.load(planes(rgb + colour, plane)), out.staging(lab_rows), width);
        out.store(lab_rows);
        const Triple<T*> sobel_rows{sobel_x + grey, sobel_y + grey, nullptr};
        sobel_row(luma.around(y, height), out.staging(sobel_rows), width);
        out.store(sobel_rows);
      });
}

std::tuple<Tensor, Tensor, Tensor> fused_texture_cpu(const Tensor& rgb) {
  check_fused_texture(rgb);
  const Tensor in = torch::stable::contiguous(rgb);
  const int64_t batch = in.size(0), height = in.size(2), width = in.size(3);
  Tensor lab = torch::stable::new_empty(in, {batch, 3, height, width});
  Tensor sobel_x = torch::stable::new_empty(in, {batch, 1, height, width});
  Tensor sobel_y = torch::stable::new_empty(in, {batch, 1, height, width});
  if (in.numel() == 0) return {lab, sobel_x, sobel_y};
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    parallel_rows(batch * height, width * 16, [&](int64_t begin, int64_t end) {
      texture_rows(static_cast<const T*>(in.const_data_ptr()), static_cast<T*>(lab.mutable_data_ptr()),
                   static_cast<T*>(sobel_x.mutable_data_ptr()), static_cast<T*>(sobel_y.mutable_data_ptr()), height,
                   width, begin, end);
    });
  });
  return {lab, sobel_x, sobel_y};
}

Tensor lab_to_rgb_grad_cpu(const Tensor& rgb, const Tensor& grad_lab) {
  check_lab_to_rgb_grad(rgb, grad_lab);
  const Tensor in = torch::stable::contiguous(rgb), upstream = torch::stable::contiguous(grad_lab);
  const int64_t batch = in.size(0), height = in.size(2), width = in.size(3), plane = height * width;
  Tensor grad = torch::stable::new_empty(in, {batch, 3, height, width});
  if (in.numel() == 0) return grad;
  dispatch_floating(in.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T *colours = static_cast<const T*>(in.const_data_ptr()),
            *g = static_cast<const T*>(upstream.const_data_ptr());
    T* out = static_cast<T*>(grad.mutable_data_ptr());
    parallel_rows(batch * height, width * 16, [&](int64_t begin, int64_t end) {
      Rows<T> colour_rows(width), grad_rows(width), out_rows(width);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row / height * 3 * plane + row % height * width;
        const Triple<T*> out_planes = planes(out + at, plane);
        lab_gradient_row(colour_rows.load(planes(colours + at, plane)), grad_rows.load(planes(g + at, plane)),
                         out_rows.staging(out_planes), width);
        out_rows.store(out_planes);
      }
    });
  });
  return grad;
}

// The adjoint of a replicating border, axis by axis: along a smoothed axis ([1 2 1], its own transpose) the gradient is
// continued by its end value, along a differenced one ([-1 0 1]) by minus its end value.
template <class T>
void sobel_grad_rows(const T* grad_x, const T* grad_y, T* out, int64_t height, int64_t width, int64_t begin,
                     int64_t end) {
  using A = accumulate_t<T>;
  Rows<T> staged(width);
  RowRing<A> x_rows(width), y_rows(width);
  slide_over_rows(
      begin, end, height,
      [&](int64_t b, int64_t y) {
        const int64_t at = (b * height + y) * width;
        widen(grad_x + at, x_rows.row(y) + 1, width);
        widen(grad_y + at, y_rows.row(y) + 1, width);
        x_rows.close(y, -1);
        y_rows.close(y, 1);
      },
      [&](int64_t b, int64_t y) {
        const int64_t at = (b * height + y) * width;
        const Triple<T*> rows{out + at, nullptr, nullptr};
        sobel_gradient_row(x_rows.around(y, height), y_rows.around(y, height), A(y > 0 ? 1 : -1),
                           A(y < height - 1 ? 1 : -1), staged.staging(rows).first, width);
        staged.store(rows);
      });
}

Tensor sobel_grad_cpu(const Tensor& grad_x, const Tensor& grad_y) {
  check_sobel_grad(grad_x, grad_y);
  const Tensor gx = torch::stable::contiguous(grad_x), gy = torch::stable::contiguous(grad_y);
  const int64_t batch = gx.size(0), height = gx.size(2), width = gx.size(3);
  Tensor grad_luma = torch::stable::new_empty(gx, {batch, 1, height, width});
  if (gx.numel() == 0) return grad_luma;
  dispatch_floating(gx.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    parallel_rows(batch * height, width * 4, [&](int64_t begin, int64_t end) {
      sobel_grad_rows(static_cast<const T*>(gx.const_data_ptr()), static_cast<const T*>(gy.const_data_ptr()),
                      static_cast<T*>(grad_luma.mutable_data_ptr()), height, width, begin, end);
    });
  });
  return grad_luma;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("fused_texture(Tensor rgb) -> (Tensor lab, Tensor sobel_x, Tensor sobel_y)");
  m.def("lab_to_rgb_grad(Tensor rgb, Tensor grad_lab) -> Tensor");
  m.def("sobel_grad(Tensor grad_x, Tensor grad_y) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("fused_texture", TORCH_BOX(&fused_texture_cpu));
  m.impl("lab_to_rgb_grad", TORCH_BOX(&lab_to_rgb_grad_cpu));
  m.impl("sobel_grad", TORCH_BOX(&sobel_grad_cpu));
}

}  // namespace arr_coc
