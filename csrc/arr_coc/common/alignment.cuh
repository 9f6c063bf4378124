// Compares rows with a sample's query tokens on CUDA and finds the best token.
#pragma once

#include "arr_coc/common/cosine.cuh"

namespace arr_coc {

// One warp computes the norm and the best token of each of `rows` rows.
template <int Columns, bool Aligned, class T, class A>
__device__ __forceinline__ void best_tokens(const T* x, int rows, const A* units, const bool* mask, int64_t tokens,
                                            int64_t width, A (&norm)[kRows], Match<A> (&match)[kRows]) {
  for (int64_t first = 0; first < tokens; first += Columns) {
    A squares[kRows], products[kRows][Columns];
    row_products<Columns, Aligned>(x, rows, units + first * width, int(min(int64_t(Columns), tokens - first)), width,
                                   squares, products);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      norm[r] = sqrt(squares[r]);
      const A inverse = inverse_norm(norm[r]);
#pragma unroll
      for (int c = 0; c < Columns; ++c)
        if (first + c < tokens && (!mask || mask[first + c])) match[r].offer(first + c, products[r][c] * inverse);
    }
  }
}

// A warp takes kRows rows of one sample.
struct RowGroups {
  int64_t batch, count, tokens, width, per_sample;

  __device__ int64_t total() const { return batch * per_sample; }
  __device__ int64_t first_row(int64_t item) const { return item % per_sample * kRows; }
  __device__ int rows(int64_t item) const { return int(min(int64_t(kRows), count - first_row(item))); }
};

template <int Columns, bool Aligned, class T, class A, class O>
__global__ void alignment_kernel(const T* features, const A* units, const bool* mask, O* out, RowGroups groups) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t item = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; item < groups.total();
       item += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t sample = item / groups.per_sample, base = sample * groups.tokens;
    const int64_t n = sample * groups.count + groups.first_row(item);
    const int rows = groups.rows(item);
    A norm[kRows];
    Match<A> match[kRows];
    best_tokens<Columns, Aligned>(features + n * groups.width, rows, units + base * groups.width,
                                  mask ? mask + base : nullptr, groups.tokens, groups.width, norm, match);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (lane == r && r < rows) out[n + r] = O(match[r].token < 0 ? A(0) : (1 + match[r].cosine) / 2);
  }
}

// The query's unit vectors and norms, in the computing dtype.
template <class T>
struct Queries {
  using A = accumulate_t<T>;
  Scratch<A> unit, norm;

  Queries(const Cuda& device, const T* query, const bool* keep, int64_t rows, int64_t width)
      : unit(device, rows * width), norm(device, rows) {
    device.launch(unit_rows_kernel<T, A>, {grid_size(rows, kCosineWarps), kCosineThreads}, query, keep, unit.data(),
                  norm.data(), rows, width);
  }
};

// A block computes a tile of a matrix product in float: Rows rows and Tokens tokens of one sample, by 16 x 16 threads
// with Rows / 16 x Tokens / 16 products each. Pieces of kDepth columns go through shared memory, transposed; the rows'
// squares are summed on the way. Each sum's order depends on the width alone. Each fmaf is explicit, because the
// compiler would contract differently for different tile sizes, and a row's bits would depend on its tile.
template <int Rows, int Tokens, bool Aligned, class T, class O>
__global__ void __launch_bounds__(kCosineThreads, 2)
    tokens_kernel(const T* features, const float* units, const bool* mask, O* out, RowGroups groups) {
  constexpr int kDepth = 32, kPer = kVector<T>, kPieces = kDepth / kPer, kTokenPieces = kDepth / 4;
  constexpr int kLoads = (Rows * kPieces + kCosineThreads - 1) / kCosineThreads;
  constexpr int kTokenLoads = Tokens * kTokenPieces / kCosineThreads;
  // Pieces in flight: a block of few rows computes faster than memory delivers.
  constexpr int kStages = Rows < 128 ? 4 : 1;
  constexpr int kMine = Rows / 16, kTokens = Tokens / 16;
  // Column k of row r is at [k][r ^ turn], so that a warp writes to different banks.
  constexpr int kTurn = kWarpSize / kPieces, kTokenTurn = kWarpSize / kTokenPieces;
  static_assert(kMine % 4 == 0 || kMine == 2, "rows are read two or four at a time");
  __shared__ __align__(16) float rows_of[kDepth][Rows], tokens_of[kDepth][Tokens];
  __shared__ float inverse[Rows];
  const int across = threadIdx.x % 16, down = threadIdx.x / 16;
  const int64_t width = groups.width, per_sample = (groups.count + Rows - 1) / Rows;
  for (int64_t item = blockIdx.x; item < groups.batch * per_sample; item += gridDim.x) {
    const int64_t sample = item / per_sample, first = item % per_sample * Rows;
    const T* from = features + (sample * groups.count + first) * width;
    const int last = int(min(int64_t(Rows), groups.count - first)) - 1;
    float best[kMine], squares[kLoads] = {};
    bool any = false;
#pragma unroll
    for (int r = 0; r < kMine; ++r) best[r] = -INFINITY;
    for (int64_t token = 0; token < groups.tokens; token += Tokens) {
      const float* unit = units + (sample * groups.tokens + token) * width;
      const int last_token = int(min(int64_t(Tokens), groups.tokens - token)) - 1;
      float products[kMine][kTokens] = {};
      T next[kStages][kLoads][kPer];
      float next_token[kStages][kTokenLoads][4];
      const auto fetch = [&](T(&next)[kLoads][kPer], float (&next_token)[kTokenLoads][4], int64_t start) {
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
          const int piece = threadIdx.x + l * kCosineThreads;
          const int64_t at = start + piece % kPieces * kPer;
#pragma unroll
          for (int i = 0; i < kPer; ++i) next[l][i] = T(0);
          if (piece < Rows * kPieces && at < width)
            load<Aligned>(from + min(piece / kPieces, last) * width, at, width, next[l]);
        }
#pragma unroll
        for (int l = 0; l < kTokenLoads; ++l) {
          const int piece = threadIdx.x + l * kCosineThreads;
          const int64_t at = start + piece % kTokenPieces * 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) next_token[l][i] = 0;
          if (at < width) load<Aligned>(unit + min(piece / kTokenPieces, last_token) * width, at, width, next_token[l]);
        }
      };
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) fetch(next[stage], next_token[stage], stage * kDepth);
      for (int64_t start = 0; start < width; start += kDepth) {
        __syncthreads();
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
          const int piece = threadIdx.x + l * kCosineThreads, k = piece % kPieces;
          if (piece >= Rows * kPieces) continue;
#pragma unroll
          for (int i = 0; i < kPer; ++i) {
            const float x = float(next[0][l][i]);
            rows_of[k * kPer + i][piece / kPieces ^ k * kTurn] = x;
            if (token == 0) squares[l] = fmaf(x, x, squares[l]);
          }
        }
#pragma unroll
        for (int l = 0; l < kTokenLoads; ++l) {
          const int piece = threadIdx.x + l * kCosineThreads, k = piece % kTokenPieces;
#pragma unroll
          for (int i = 0; i < 4; ++i) tokens_of[k * 4 + i][piece / kTokenPieces ^ k * kTokenTurn] = next_token[0][l][i];
        }
        __syncthreads();
        // Element by element, because nvcc 13.0 drops the second part of a memcpy of two of these.
#pragma unroll
        for (int stage = 0; stage + 1 < kStages; ++stage) {
#pragma unroll
          for (int l = 0; l < kLoads; ++l) {
#pragma unroll
            for (int i = 0; i < kPer; ++i) next[stage][l][i] = next[stage + 1][l][i];
          }
#pragma unroll
          for (int l = 0; l < kTokenLoads; ++l) {
#pragma unroll
            for (int i = 0; i < 4; ++i) next_token[stage][l][i] = next_token[stage + 1][l][i];
          }
        }
        fetch(next[kStages - 1], next_token[kStages - 1], start + kStages * kDepth);
#pragma unroll
        for (int k = 0; k < kDepth; ++k) {
          float x[kMine], y[kTokens];
          constexpr int kWord = kMine < 4 ? kMine : 4;
#pragma unroll
          for (int r = 0; r < kMine; r += kWord)
            memcpy(x + r, __builtin_assume_aligned(&rows_of[k][(down * kMine + r) ^ k / kPer * kTurn], kWord * 4),
                   kWord * 4);
          memcpy(y, __builtin_assume_aligned(&tokens_of[k][across * kTokens ^ k / 4 * kTokenTurn], kTokens * 4),
                 kTokens * 4);
#pragma unroll
          for (int r = 0; r < kMine; ++r) {
#pragma unroll
            for (int t = 0; t < kTokens; ++t) products[r][t] = fmaf(x[r], y[t], products[r][t]);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const int64_t which = token + across * kTokens + t;
        if (which >= groups.tokens || (mask && !mask[sample * groups.tokens + which])) continue;
        any = true;
#pragma unroll
        for (int r = 0; r < kMine; ++r) best[r] = nan_max(best[r], products[r][t]);
      }
    }
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const int piece = threadIdx.x + l * kCosineThreads;
#pragma unroll
      for (int offset = kPieces / 2; offset > 0; offset /= 2)
        squares[l] += __shfl_xor_sync(0xffffffffu, squares[l], offset);
      if (piece < Rows * kPieces && piece % kPieces == 0) inverse[piece / kPieces] = inverse_norm(sqrt(squares[l]));
    }
    any = __any_sync(0xffffffffu, any);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kMine; ++r) {
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2)
        best[r] = nan_max(best[r], __shfl_xor_sync(0xffffffffu, best[r], offset));
      const int row = down * kMine + r;
      if (across == r && row <= last)
        out[sample * groups.count + first + row] = O(any ? fmaf(best[r], inverse[row], 1.0f) / 2 : 0.0f);
    }
  }
}

// Computes [B, N] from rows [B, N, D] and unit vectors [B, T, D]. The result's type O may differ from T.
template <class T, class A, class O>
void launch_alignment(const T* features, const A* units, const bool* keep, O* out, int64_t batch, int64_t count,
                      int64_t tokens, int64_t width, const Cuda& device) {
  const RowGroups groups{batch, count, tokens, width, (count + kRows - 1) / kRows};
  const bool aligned = has_whole_vectors(features, width);
  if constexpr (!std::is_same_v<T, double>) {
    if (tokens > 8) {
      const auto launch = [&](auto rows, auto at_once) {
        const auto kernel =
            aligned ? tokens_kernel<rows, at_once, true, T, O> : tokens_kernel<rows, at_once, false, T, O>;
        device.launch(kernel, {grid_size(batch * ceil_div(count, rows), 1), kCosineThreads}, features, units, keep, out,
                      groups);
      };
      const Constant<32> few;
      const Constant<64> some;
      const Constant<128> many;
      const bool large = batch * count >= 128 * 132;
      if (tokens <= 32) return large ? launch(many, few) : launch(few, few);
      return large ? launch(many, some) : launch(few, some);
    }
  }
  const auto kernel = tokens == 1
                          ? (aligned ? alignment_kernel<1, true, T, A, O> : alignment_kernel<1, false, T, A, O>)
                          : (aligned ? alignment_kernel<8, true, T, A, O> : alignment_kernel<8, false, T, A, O>);
  device.launch(kernel, {grid_size(batch * groups.per_sample, kCosineWarps), kCosineThreads}, features, units, keep,
                out, groups);
}

}  // namespace arr_coc
