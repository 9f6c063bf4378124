// From column sums over chunks of rows to the mean row as a unit vector.
#pragma once

#include "common/cosine.cuh"

namespace arr_coc {

constexpr int kMeanThreads = 1024;

// A block a sample. Each chunk is one of `groups` and one thread's; the groups' sums are added up in order.
template <bool Aligned, class A>
__global__ void __launch_bounds__(kMeanThreads)
    mean_unit_kernel(const A* partial, A* unit, A* norm, int64_t batch, int64_t chunks, int64_t rows, int64_t width,
                     int pieces) {
  constexpr int kPer = kPerLane<A>;
  __shared__ A shared[kMeanThreads / kWarpSize], sums[kMeanThreads][kPer];
  const int groups = kMeanThreads / pieces, group = threadIdx.x / pieces, piece = threadIdx.x % pieces;
  for (int64_t sample = blockIdx.x; sample < batch; sample += gridDim.x) {
    A* out = unit + sample * width;
    A square = 0;
    for (int64_t first = 0; first < width; first += int64_t(pieces) * kPer) {
      const int64_t at = first + piece * kPer;
      A sum[kPer] = {};
      if (group < groups && at < width) {
#pragma unroll 8
        for (int64_t chunk = group; chunk < chunks; chunk += groups) {
          A values[kPer];
          load<Aligned>(partial + (sample * chunks + chunk) * width, at, width, values);
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
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          sum[i] /= A(rows);
          if (at + i < width) square += sum[i] * sum[i];
        }
        store<Aligned>(out, at, width, sum);  // read again below, by this thread
      }
      __syncthreads();
    }
    const A length = sqrt(block_sum(square, shared)), inverse = inverse_norm(length);
    for (int64_t at = piece * kPer; group == 0 && at < width; at += int64_t(pieces) * kPer)
      for (int64_t d = at; d < min(at + kPer, width); ++d) out[d] *= inverse;
    if (norm && threadIdx.x == 0) norm[sample] = length;
  }
}

// `partial` [B, chunks, D] to `unit` [B, D] and `norm` [B], which may be null. `rows` is what each sample's mean is
// over.
template <class A>
void launch_mean_unit(const A* partial, A* unit, A* norm, int64_t batch, int64_t chunks, int64_t rows, int64_t width,
                      cudaStream_t stream) {
  const int pieces = int(std::min<int64_t>(kMeanThreads, (width + kPerLane<A> - 1) / kPerLane<A>));
  const unsigned blocks = grid_size(batch, 1);
  if (is_vectorisable(partial, width) && is_vectorisable(unit, width)) {
    mean_unit_kernel<true>
        <<<blocks, kMeanThreads, 0, stream>>>(partial, unit, norm, batch, chunks, rows, width, pieces);
  } else {
    mean_unit_kernel<false>
        <<<blocks, kMeanThreads, 0, stream>>>(partial, unit, norm, batch, chunks, rows, width, pieces);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace arr_coc
