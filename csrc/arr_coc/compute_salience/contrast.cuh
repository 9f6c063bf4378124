// How much a patch's mean colour differs from its neighbours'. compute_salience.cpp has the formulas.
#pragma once

#include "arr_coc/common/cuda.cuh"

namespace arr_coc {

constexpr int kAround = 9, kItself = 4;  // the 3 x 3 patches around a patch, row by row

// Patch n of a grid, and what is around it.
struct Place {
  int64_t n, row, column, rows, columns;

  __device__ __forceinline__ Place(int64_t n, int64_t rows, int64_t columns)
      : n(n), row(n / columns), column(n - row * columns), rows(rows), columns(columns) {}

  // Whether there is a neighbour at one of the 9 places.
  __device__ __forceinline__ bool has(int around) const {
    const int64_t i = row + around / 3 - 1, j = column + around % 3 - 1;
    return around != kItself && i >= 0 && i < rows && j >= 0 && j < columns;
  }

  __device__ __forceinline__ int64_t neighbour(int around) const {
    return n + (around / 3 - 1) * columns + around % 3 - 1;
  }

  // At least 1, because it divides.
  __device__ __forceinline__ int neighbours() const {
    const int down = 1 + (row > 0) + (row + 1 < rows), right = 1 + (column > 0) + (column + 1 < columns);
    return max(down * right - 1, 1);
  }
};

// The mean distance of a patch's colour from its neighbours'; 0 without neighbours. `colours` are the sample's, [3, N].
// All loads come before the first root, which has a branch.
template <class A, class T>
__device__ __forceinline__ A mean_distance(const T* colours, const Place& at) {
  const int64_t count = at.rows * at.columns;
  A squares[kAround];
#pragma unroll
  for (int i = 0; i < kAround; ++i) {
    const int64_t other = at.has(i) ? at.neighbour(i) : at.n;
    squares[i] = 0;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const A apart = A(colours[c * count + at.n]) - A(colours[c * count + other]);
      squares[i] += apart * apart;
    }
  }
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kAround; ++i) {
    const A distance = sqrt(squares[i]);
    sum += at.has(i) ? distance : A(0);
  }
  return sum / A(at.neighbours());
}

}  // namespace arr_coc
