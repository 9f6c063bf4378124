// Helpers of CPU kernels that walk down an image: rows in the computing type, and the three rows of a stencil.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "arr_coc/common/colour.h"
#include "arr_coc/common/convert.h"
#include "arr_coc/common/cpu.h"
#include "arr_coc/common/dispatch.h"

namespace arr_coc {

template <class A>
ARR_COC_EVERY_ISA void luma_row(Triple<const A*> rgb, A* luma, int64_t width) {
#pragma omp simd
  for (int64_t x = 0; x < width; ++x) luma[x] = luma_of<CpuCurves<A>>(rgb.first[x], rgb.second[x], rgb.third[x]);
}

// The same row of three planes.
template <class T>
Triple<T*> planes(T* first, int64_t plane) {
  return {first, first + plane, first + 2 * plane};
}

// Up to three rows in the computing type. If that is the tensor's type, these are the tensor's rows without a copy. A
// null row is left out.
template <class T>
class Rows {
 public:
  using A = accumulate_t<T>;
  explicit Rows(int64_t width) : width_(width), buffer_(kCopies ? 3 * width : 0) {}

  Triple<const A*> load(Triple<const T*> rows) {
    if constexpr (kCopies) {
      const Triple<A*> copies = planes(buffer_.data(), width_);
      if (rows.first) widen(rows.first, copies.first, width_);
      if (rows.second) widen(rows.second, copies.second, width_);
      if (rows.third) widen(rows.third, copies.third, width_);
      return {copies.first, copies.second, copies.third};
    } else {
      return rows;
    }
  }

  // Memory to write to, from which store() copies to `rows`.
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

// For rows [begin, end) of the batch's images, one below the other: calls fill(b, y) once and in order for every row of
// image b within one row of the current one, then f(b, y) for the current row.
template <class Fill, class F>
void slide_over_rows(int64_t begin, int64_t end, int64_t height, const Fill& fill, const F& f) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / height, y = row % height, last = std::min(y + 1, height - 1);
    for (int64_t fresh = row == begin || y == 0 ? std::max<int64_t>(y - 1, 0) : y + 1; fresh <= last; ++fresh)
      fill(b, fresh);
    f(b, y);
  }
}

}  // namespace arr_coc
