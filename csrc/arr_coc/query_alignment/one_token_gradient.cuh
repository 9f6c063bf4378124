// The gradients for a query of one token on CUDA, with one read of the features: a warp holds a row in registers until
// its cosine is known, and keeps the sums of its columns over the rows of a chunk.
#pragma once

#include "arr_coc/common/column_units.cuh"
#include "arr_coc/query_alignment/query_alignment.h"

namespace arr_coc {

namespace one_token {

constexpr int kMostColumns = 32;  // of a lane

template <class T, class A>
struct Call {
  const T *grad, *features, *query;
  const bool* mask;
  T* grad_features;  // null where it is not needed
  A* partial;        // [B, chunks, D]: the rows' sums for the query's gradient; null where it is not needed
  A *unit, *norm;    // of the query
  ColumnCut cut;
};

// A block takes a chunk. Rows start on 16 bytes and have whole pieces of 16 bytes, `kPieces` or fewer a lane.
template <int kPieces, class T, class A>
__global__ void __launch_bounds__(kCosineThreads, 2) gradient_kernel(const Call<T, A> call) {
  constexpr int kPer = kVector<T>, kStride = kWarpSize * kPer;
  __shared__ A sums[kCosineWarps][kPieces * kStride];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const ColumnCut& cut = call.cut;
  const int64_t width = cut.width;
  // Zeros beyond the width.
  const auto read = [&](const T* row, uint4(&raw)[kPieces]) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int64_t at = k * kStride + lane * kPer;
      raw[k] = at < width ? *reinterpret_cast<const uint4*>(row + at) : uint4{};
    }
  };

  for (int64_t item = blockIdx.x; item < cut.batch * cut.chunks; item += gridDim.x) {
    const int64_t sample = item / cut.chunks, chunk = item % cut.chunks;
    const int64_t end = sample * cut.rows + min((chunk + 1) * cut.chunk_rows, cut.rows);
    const bool kept = !call.mask || call.mask[sample];
    uint4 raw[kPieces];
    A unit[kPieces][kPer], columns[kPieces][kPer] = {}, square = 0;
    read(call.query + sample * width, raw);
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      unpack<T>(raw[k], unit[k]);
#pragma unroll
      for (int i = 0; i < kPer; ++i) square += unit[k][i] * unit[k][i];
    }
    const A length = sqrt(warp_sum(square)), inverse_query = inverse_norm(length);
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) unit[k][i] *= inverse_query;
    }
    for (int64_t n = sample * cut.rows + chunk * cut.chunk_rows + warp; n < end; n += kCosineWarps) {
      read(call.features + n * width, raw);
      const A upstream = A(call.grad[n]) / 2;
      A product = 0;
      square = 0;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        A x[kPer];
        unpack<T>(raw[k], x);
#pragma unroll
        for (int i = 0; i < kPer; ++i) square += x[i] * x[i], product += x[i] * unit[k][i];
      }
      const A norm = sqrt(warp_sum(square)), inverse = inverse_norm(norm), scale = upstream * inverse;
      const A along = norm_passes(norm) * warp_sum(product) * inverse * inverse;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        A x[kPer], result[kPer];
        unpack<T>(raw[k], x);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          columns[k][i] += scale * x[i];
          result[i] = kept ? scale * (unit[k][i] - along * x[i]) : A(0);
        }
        const int64_t at = k * kStride + lane * kPer;
        if (call.grad_features && at < width) store<true>(call.grad_features + n * width, at, width, result);
      }
    }
    if (!call.partial) continue;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int64_t at = k * kStride + lane * kPer + i;
        sums[warp][at] = columns[k][i];
        if (chunk == 0 && warp == 0 && at < width) call.unit[sample * width + at] = unit[k][i];
      }
    }
    if (chunk == 0 && threadIdx.x == 0) call.norm[sample] = length;
    __syncthreads();
    for (int64_t at = threadIdx.x; at < width; at += kCosineThreads) {
      A sum = 0;
#pragma unroll
      for (int other = 0; other < kCosineWarps; ++other) sum += sums[other][at];
      call.partial[item * width + at] = sum;
    }
    __syncthreads();
  }
}

// Whether `run` computes such a call. That does not depend on the batch, so that a sample has the same bits in all.
template <class T>
bool takes(const QueryAlignmentGrad<T>& call) {
  return !std::is_same_v<T, double> && call.tokens == 1 && call.width % kVector<T> == 0 &&
         call.width <= kMostColumns * kWarpSize;
}

template <class T>
void run(const Cuda& device, const QueryAlignmentGrad<T>& inputs) {
  using A = accumulate_t<T>;
  const int64_t batch = inputs.batch, width = inputs.width;
  const ColumnCut cut(batch, inputs.count, width);
  const AlignedData<T> features(device, inputs.features, batch * inputs.count * width);
  const AlignedData<T> query(device, inputs.query, batch * width);
  const bool sums = inputs.grad_query;
  Scratch<A> partial(device, sums ? cut.partial_size() : 0), unit(device, sums ? batch * width : 0);
  Scratch<A> norm(device, sums ? batch : 0);
  const Call<T, A> call{inputs.grad, features.data(),      query.data(),
                        inputs.mask, inputs.grad_features, sums ? partial.data() : nullptr,
                        unit.data(), norm.data(),          cut};
  constexpr int kMost = kMostColumns / kVector<T>;
  const int64_t pieces = (width / kVector<T> + kWarpSize - 1) / kWarpSize;
  const auto kernel = pieces <= kMost / 4       ? gradient_kernel<kMost / 4, T, A>
                      : pieces <= kMost / 2     ? gradient_kernel<kMost / 2, T, A>
                      : pieces <= kMost * 3 / 4 ? gradient_kernel<kMost * 3 / 4, T, A>
                                                : gradient_kernel<kMost, T, A>;
  device.launch(kernel, {grid_size(batch * cut.chunks, 1), kCosineThreads}, call);
  if (sums)
    launch_through_unit<A>(partial.data(), cut, unit.data(), norm.data(), inputs.mask, A(1), inputs.grad_query, device);
}

}  // namespace one_token

}  // namespace arr_coc
