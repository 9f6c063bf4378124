#include <torch/csrc/stable/library.h>

#include "arr_coc/common/rows.cuh"
#include "arr_coc/compute_entropy/compute_entropy.h"

namespace arr_coc {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// compute_entropy.cpp has the formulas. Here they use powers of two, with `scale` = log2(e) / tau.

template <bool Wide, bool Aligned, class T, class A>
__global__ void __launch_bounds__(kThreads)
    entropy_kernel(const T* x, T* out, int64_t rows, int64_t width, int warp_rows, A scale, A norm) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t stride = int64_t(gridDim.x) * kWarps * warp_rows;
  for (int64_t first = (int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize) * warp_rows; first < rows;
       first += stride) {
    scan_rows<Wide, Aligned, 0>(
        x + first * width, int(min(int64_t(warp_rows), rows - first)), kBatch, width, scale,
        static_cast<const SharedVector<T, A>*>(nullptr), [] {},
        [&](int from, int count, const auto& sums) {
          if (lane % kGroup == 0 && lane / kGroup < count)
            out[first + from + lane / kGroup] = T(sums.entropy.bits() * norm);
        });
  }
}

template <bool Aligned, class T, class A>
__global__ void __launch_bounds__(kThreads)
    entropy_grad_kernel(const T* upstream, const T* x, T* out, int64_t rows, int64_t width, A scale, A norm) {
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; row < rows;
       row += int64_t(gridDim.x) * kWarps) {
    RowTile<T> tile;
    const A factor = -A(upstream[row]) * norm;
    OnlineEntropy<A> entropy;
    for (int64_t start = 0; start < width; start += kTile<T>) {
      const int size = RowTile<T>::size(start, width);
      tile.template load<Aligned>(x + row * width + start, size);
      entropy.raise(max(entropy.top, tile.template most<Aligned, A>(size)), scale);
      tile.template for_pieces<Aligned, A>(size, [&](int, const auto& values, int inside) {
#pragma unroll
        for (int i = 0; i < RowTile<T>::kPer; ++i)
          if (i < inside) entropy.add(values[i], scale);
      });
    }
    A top = entropy.top;
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, offset));
    entropy.raise(top, scale);
    entropy.sum = warp_sum(entropy.sum);
    entropy.weighted = warp_sum(entropy.weighted);
    const A bits = entropy.bits(), all = log2(entropy.sum);
    for (int64_t start = 0; start < width; start += kTile<T>) {
      const int size = RowTile<T>::size(start, width);
      if (width > kTile<T>) tile.template load<Aligned>(x + row * width + start, size);
      tile.template for_pieces<Aligned, A>(size, [&](int k, const auto& values, int inside) {
        A slope[RowTile<T>::kPer];
#pragma unroll
        for (int i = 0; i < RowTile<T>::kPer; ++i) {
          const A log_p = (values[i] - top) * scale - all, p = power_of_two(log_p);
          slope[i] = p > 0 ? factor * p * (log_p + bits) : factor * p;
        }
        store<Aligned>(out + row * width + start, RowTile<T>::at(k), RowTile<T>::at(k) + inside, slope);
      });
    }
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const Entropy<T>& call) {
  using A = accumulate_t<T>;
  const auto [x, out, rows, width, scale, norm] = call;
  const auto kernel = !has_whole_vectors(x, width) ? entropy_kernel<true, false, T, A>
                      : width > kTile<T>           ? entropy_kernel<true, true, T, A>
                                                   : entropy_kernel<false, true, T, A>;
  const int warp_rows = rows_per_warp(rows);
  device.launch(kernel, {grid_size(rows, kWarps * warp_rows), kThreads}, x, out, rows, width, warp_rows, scale, norm);
}

template <class T>
void run(const Cuda& device, const EntropyGrad<T>& call) {
  using A = accumulate_t<T>;
  const auto [grad, x, out, rows, width, scale, norm] = call;
  const bool aligned = has_whole_vectors(x, width) && has_whole_vectors(out, width);
  const auto kernel = aligned ? entropy_grad_kernel<true, T, A> : entropy_grad_kernel<false, T, A>;
  device.launch(kernel, {grid_size(rows, kWarps), kThreads}, grad, x, out, rows, width, scale, norm);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("compute_entropy", TORCH_BOX(&compute_entropy<Cuda>));
  m.impl("compute_entropy_grad", TORCH_BOX(&compute_entropy_grad<Cuda>));
}

}  // namespace arr_coc
