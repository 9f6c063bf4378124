// Turns sums over chunks of rows into unit vectors and into their gradients.
#pragma once

#include "arr_coc/common/cosine.cuh"

namespace arr_coc {

constexpr int kChunkThreads = 1024;

// A block of kChunkThreads sums the vectors of `width` at from + k stride, k below `chunks`. It calls f(at, sum) with
// each piece of the sum in the threads below `pieces`; each thread always gets the same pieces. The threads form groups
// that share the chunks, and the groups' sums are added in order.
template <bool Aligned, class A, class F>
__device__ __forceinline__ void sum_chunks(const A* from, int64_t stride, int64_t chunks, int64_t width, int pieces,
                                           const F& f) {
  constexpr int kPer = kVector<A>;
  __shared__ A sums[kChunkThreads][kPer];
  const int groups = kChunkThreads / pieces, group = threadIdx.x / pieces, piece = threadIdx.x % pieces;
  for (int64_t first = 0; first < width; first += int64_t(pieces) * kPer) {
    const int64_t at = first + piece * kPer;
    A sum[kPer] = {};
    if (group < groups && at < width) {
#pragma unroll 8
      for (int64_t chunk = group; chunk < chunks; chunk += groups) {
        A values[kPer];
        load<Aligned>(from + chunk * stride, at, width, values);
#pragma unroll
        for (int i = 0; i < kPer; ++i) sum[i] += values[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) sums[threadIdx.x][i] = sum[i];
    __syncthreads();
    if (group == 0 && at < width) {
      for (int other = 1; other < groups; ++other) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) sum[i] += sums[other * pieces + piece][i];
      }
      f(at, sum);
    }
    __syncthreads();
  }
}

// One block per sample.
template <bool Aligned, class A>
__global__ void __launch_bounds__(kChunkThreads)
    mean_unit_kernel(const A* partial, A* unit, A* norm, ColumnCut cut, int pieces) {
  constexpr int kPer = kVector<A>;
  __shared__ A shared[kChunkThreads / kWarpSize];
  for (int64_t sample = blockIdx.x; sample < cut.batch; sample += gridDim.x) {
    A* out = unit + sample * cut.width;
    A square = 0;
    sum_chunks<Aligned>(partial + sample * cut.chunks * cut.width, cut.width, cut.chunks, cut.width, pieces,
                        [&](int64_t at, A(&mean)[kPer]) {
#pragma unroll
                          for (int i = 0; i < kPer; ++i) {
                            mean[i] /= A(cut.rows);
                            square += mean[i] * mean[i];  // beyond the width they are 0
                          }
                          store<Aligned>(out, at, cut.width, mean);  // read again below, by this thread
                        });
    const A length = sqrt(block_sum(square, shared)), inverse = inverse_norm(length);
    for (int64_t at = threadIdx.x * kPer; threadIdx.x < pieces && at < cut.width; at += int64_t(pieces) * kPer)
      for (int64_t d = at; d < min(at + kPer, cut.width); ++d) out[d] *= inverse;
    if (norm && threadIdx.x == 0) norm[sample] = length;
  }
}

// One block per kMeanPieces pieces of a sample's mean.
constexpr int kMeanPieces = 32;

template <bool Aligned, class A>
__global__ void __launch_bounds__(kChunkThreads) mean_kernel(const A* partial, A* mean, ColumnCut cut, int64_t slabs) {
  constexpr int kPer = kVector<A>;
  for (int64_t item = blockIdx.x; item < cut.batch * slabs; item += gridDim.x) {
    const int64_t sample = item / slabs, start = item % slabs * kMeanPieces * kPer;
    const int64_t width = min(cut.width - start, int64_t(kMeanPieces * kPer));
    sum_chunks<Aligned>(partial + sample * cut.chunks * cut.width + start, cut.width, cut.chunks, width, kMeanPieces,
                        [&](int64_t at, A(&sum)[kPer]) {
#pragma unroll
                          for (int i = 0; i < kPer; ++i) sum[i] /= A(cut.rows);
                          store<Aligned>(mean + sample * cut.width + start, at, width, sum);
                        });
  }
}

// One block per vector. Computes the gradient of v times `scale` from the gradient of unit = v / max(|v|, floor), which
// is the sum of `partial` over the chunks. Zeros where `keep` (may be null) is false. Overwrites `partial`'s first
// chunk.
template <bool Aligned, class A, class O>
__global__ void __launch_bounds__(kChunkThreads)
    through_unit_kernel(A* partial, ColumnCut cut, const A* unit, const A* norm, const bool* keep, A scale, O* out,
                        int pieces) {
  constexpr int kPer = kVector<A>;
  __shared__ A shared[kChunkThreads / kWarpSize];
  for (int64_t row = blockIdx.x; row < cut.batch * cut.groups; row += gridDim.x) {
    const int64_t sample = row / cut.groups, g = row % cut.groups;
    A* upstream = partial + (sample * cut.chunks * cut.groups + g) * cut.width;
    const A* direction = unit + row * cut.width;
    A along = 0;
    sum_chunks<Aligned>(upstream, cut.groups * cut.width, cut.chunks, cut.width, pieces,
                        [&](int64_t at, const A(&sum)[kPer]) {
                          A towards[kPer];
                          load<Aligned>(direction, at, cut.width, towards);
#pragma unroll
                          for (int i = 0; i < kPer; ++i) along += sum[i] * towards[i];
                          store<Aligned>(upstream, at, cut.width, sum);  // read again below, by this thread
                        });
    along = block_sum(along, shared) * norm_passes(norm[row]);
    const A inverse = inverse_norm(norm[row]) * scale;
    const bool kept = !keep || keep[row];
    for (int64_t at = threadIdx.x * kPer; threadIdx.x < pieces && at < cut.width; at += int64_t(pieces) * kPer)
      for (int64_t d = at; d < min(at + kPer, cut.width); ++d)
        out[row * cut.width + d] = O(kept ? inverse * (upstream[d] - along * direction[d]) : A(0));
  }
}

// One thread for each 16-byte piece of a vector.
template <class A>
int pieces_of(int64_t width) {
  return int(std::min<int64_t>(kChunkThreads, (width + kVector<A> - 1) / kVector<A>));
}

// Computes `mean` [B, D] from `partial`, the result of launch_column_sums.
template <class A>
void launch_mean(const A* partial, A* mean, const ColumnCut& cut, const Cuda& device) {
  constexpr int64_t kSlab = kMeanPieces * kVector<A>;
  const int64_t slabs = (cut.width + kSlab - 1) / kSlab;
  const bool aligned = has_whole_vectors(partial, cut.width) && has_whole_vectors(mean, cut.width);
  const auto kernel = aligned ? mean_kernel<true, A> : mean_kernel<false, A>;
  device.launch(kernel, {grid_size(cut.batch * slabs, 1), kChunkThreads}, partial, mean, cut, slabs);
}

// Computes `unit` [B, D] and `norm` [B], which may be null, from `partial`, the result of launch_column_sums.
template <class A>
void launch_mean_unit(const A* partial, A* unit, A* norm, const ColumnCut& cut, const Cuda& device) {
  const bool aligned = has_whole_vectors(partial, cut.width) && has_whole_vectors(unit, cut.width);
  const auto kernel = aligned ? mean_unit_kernel<true, A> : mean_unit_kernel<false, A>;
  device.launch(kernel, {grid_size(cut.batch, 1), kChunkThreads}, partial, unit, norm, cut, pieces_of<A>(cut.width));
}

// See through_unit_kernel.
template <class A, class O>
void launch_through_unit(A* partial, const ColumnCut& cut, const A* unit, const A* norm, const bool* keep, A scale,
                         O* out, const Cuda& device) {
  const bool aligned = has_whole_vectors(partial, cut.width) && has_whole_vectors(unit, cut.width);
  const auto kernel = aligned ? through_unit_kernel<true, A, O> : through_unit_kernel<false, A, O>;
  device.launch(kernel, {grid_size(cut.batch * cut.groups, 1), kChunkThreads}, partial, cut, unit, norm, keep, scale,
                out, pieces_of<A>(cut.width));
}

}  // namespace arr_coc
