// Helpers of CUDA kernels that walk down an RGB image: a thread reads neighbouring columns row by row and computes the
// Sobel stencil on their luma. Columns beside come from neighbouring lanes, rows above are kept in registers.
#pragma once

#include <cstring>

#include "arr_coc/common/colour.cuh"
#include "arr_coc/common/cuda.cuh"
#include "arr_coc/common/dispatch.h"

namespace arr_coc {

constexpr int64_t kGridLimit = 65535;  // of a grid's y and z

// Where a grid's first block is.
struct Origin {
  int64_t sample, row;
};

// Calls launch(blocks, origin) for grids that cover the rows of all samples, `across` blocks for every `block_rows` of
// them. One grid is enough for fewer than 65536 samples of as many blocks. Further grids take the rest, because loops
// in the kernels would cost registers.
template <class F>
void for_each_grid(int64_t batch, int64_t rows, int64_t block_rows, unsigned across, const F& launch) {
  for (int64_t sample = 0; sample < batch; sample += kGridLimit)
    for (int64_t row = 0; row < rows; row += kGridLimit * block_rows)
      launch(dim3(across, grid_size(rows - row, block_rows, kGridLimit), grid_size(batch - sample, 1, kGridLimit)),
             Origin{sample, row});
}

// Whether rows of `size` values, the first at `pointer`, are aligned for a Pack. The result is the same for all samples
// of a batch, so that they take the same path.
template <int n, class T>
bool packs(const T* pointer, int64_t size) {
  return size % n == 0 && reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T, n>) == 0;
}

// Stores a Pack at once. For an assignment, the compiler makes n stores of parts of every sector, which writes sectors
// twice.
template <class T, int n>
__device__ __forceinline__ void store_pack(T* at, const Pack<T, n>& pack) {
  if constexpr (sizeof(pack) % 8 != 0) {
    *reinterpret_cast<Pack<T, n>*>(at) = pack;
  } else {
    unsigned words[sizeof(pack) / 4];
    memcpy(words, &pack, sizeof(pack));
    unsigned* const to = reinterpret_cast<unsigned*>(at);
    if constexpr (sizeof(pack) == 8) {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < int(sizeof(pack) / 4); i += 4)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + i), "r"(words[i]), "r"(words[i + 1]),
                     "r"(words[i + 2]), "r"(words[i + 3])
                     : "memory");
    }
  }
}

// A row of the n columns, and the pixel beside them if the neighbouring lane belongs to another warp.
template <class T, int n>
struct PixelRow {
  Pack<T, n> r, g, b;
  T edge_r, edge_g, edge_b;
};

// For an eighth of the luma: right minus left, and left + 2 here + right.
template <class A, int n>
struct Slopes {
  A across[n], smooth[n];
};

// Every lane of a warp has one, n columns to the right of the previous lane's. All lanes load and compute slopes
// together.
template <class T, int n>
class ImageColumns {
 public:
  using A = accumulate_t<T>;

  // Starts at row `y` - 1. Lanes past the last column repeat it.
  __device__ __forceinline__ ImageColumns(const T* image, int64_t height, int64_t width, int64_t x, int64_t y)
      : plane_(height * width), width_(width), at_top_(y == 0), below_(int(min(height - 1 - y, int64_t(1) << 30))) {
    x = min(x, width - n);
    const int lane = threadIdx.x % kWarpSize;
    first_ = x == 0;
    last_ = x == width - n;
    edge_ = lane == 0 && !first_ ? -1 : lane == kWarpSize - 1 && !last_ ? n : 0;
    at_ = image + max(y - 1, int64_t(0)) * width + x;
  }

  // Loads row y - 1, or the image's first row if y = 0. Call it once, before load_next.
  __device__ __forceinline__ PixelRow<T, n> load_above() {
    const PixelRow<T, n> row = load();
    if (!at_top_) at_ += width_;
    return row;
  }

  // Loads the next row; below the image, its last row.
  __device__ __forceinline__ PixelRow<T, n> load_next() {
    const PixelRow<T, n> row = load();
    if (--below_ >= 0) at_ += width_;
    return row;
  }

  __device__ __forceinline__ Slopes<A, n> slopes(const PixelRow<T, n>& row) const {
    A luma[n + 2];
#pragma unroll
    for (int i = 0; i < n; ++i) luma[i + 1] = eighth_luma(row.r.values[i], row.g.values[i], row.b.values[i]);
    const A beside = eighth_luma(row.edge_r, row.edge_g, row.edge_b);
    const A left = __shfl_up_sync(0xffffffffu, luma[n], 1), right = __shfl_down_sync(0xffffffffu, luma[1], 1);
    luma[0] = first_ ? luma[1] : edge_ < 0 ? beside : left;
    luma[n + 1] = last_ ? luma[n] : edge_ > 0 ? beside : right;
    Slopes<A, n> slopes;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      slopes.across[i] = luma[i + 2] - luma[i];
      slopes.smooth[i] = CudaCurves<A>::multiply_add(A(2), luma[i + 1], luma[i] + luma[i + 2]);
    }
    return slopes;
  }

 private:
  __device__ __forceinline__ PixelRow<T, n> load() const {
    PixelRow<T, n> row;
    row.r = *reinterpret_cast<const Pack<T, n>*>(at_);
    row.g = *reinterpret_cast<const Pack<T, n>*>(at_ + plane_);
    row.b = *reinterpret_cast<const Pack<T, n>*>(at_ + 2 * plane_);
    if (edge_ != 0) {
      row.edge_r = at_[edge_];
      row.edge_g = at_[plane_ + edge_];
      row.edge_b = at_[2 * plane_ + edge_];
    }
    return row;
  }

  static __device__ __forceinline__ A eighth_luma(T r, T g, T b) {
    using Curves = CudaCurves<A>;
    return Curves::multiply_add(A(kLumaR / 8), A(r), Curves::multiply_add(A(kLumaG / 8), A(g), A(kLumaB / 8) * A(b)));
  }

  const T* at_;
  int64_t plane_, width_;
  bool at_top_, first_, last_;
  int below_;  // rows below the next; a strip is never as long as the bound it is cut to
  int edge_;   // column of the pixel beside, from the lane's first; 0 if the neighbouring lane has it
};

template <class A, int n>
__device__ __forceinline__ A sobel_x(const Slopes<A, n>& up, const Slopes<A, n>& at, const Slopes<A, n>& down, int i) {
  return CudaCurves<A>::multiply_add(A(2), at.across[i], up.across[i] + down.across[i]);
}

template <class A, int n>
__device__ __forceinline__ A sobel_y(const Slopes<A, n>& up, const Slopes<A, n>& down, int i) {
  return down.smooth[i] - up.smooth[i];
}

}  // namespace arr_coc
