#include <torch/csrc/stable/library.h>

#include "arr_coc/add_out/add_out.h"
#include "arr_coc/common/cuda.cuh"

namespace arr_coc {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ T add(T a, T b) {
  return T(accumulate_t<T>(a) + accumulate_t<T>(b));
}

template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  T values[size];
};

// `packs` 16-byte packs, then the elements that fill no pack. Without __restrict__: out may be a or b.
template <class T>
__global__ void add_linear_kernel(const T* a, const T* b, T* out, int64_t size, int64_t packs) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t p = thread; p < packs; p += threads) {
    const Pack<T> left = reinterpret_cast<const Pack<T>*>(a)[p], right = reinterpret_cast<const Pack<T>*>(b)[p];
    Pack<T> sum;
#pragma unroll
    for (int j = 0; j < Pack<T>::size; ++j) sum.values[j] = add(left.values[j], right.values[j]);
    reinterpret_cast<Pack<T>*>(out)[p] = sum;
  }
  for (int64_t i = packs * Pack<T>::size + thread; i < size; i += threads) out[i] = add(a[i], b[i]);
}

// One element a thread, neighbours along the dimension in which out's stride is smallest. Index is uint32 where it
// holds every element, because a 64-bit division costs several times as much; offsets are 64-bit always.
template <class T, class Index>
__global__ void add_strided_kernel(const T* a, const T* b, T* out, const AddLayout layout, int64_t size) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += int64_t(gridDim.x) * blockDim.x) {
    int64_t a_offset = 0, b_offset = 0, out_offset = 0;
    Index index = Index(i);
    for (int d = layout.rank - 1; d >= 0; --d) {
      const Index next = index / Index(layout.size[d]);
      const int64_t place = int64_t(index - next * Index(layout.size[d]));
      a_offset += place * layout.stride[AddLayout::kA][d];
      b_offset += place * layout.stride[AddLayout::kB][d];
      out_offset += place * layout.stride[AddLayout::kOut][d];
      index = next;
    }
    out[out_offset] = add(a[a_offset], b[b_offset]);
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const AddOut<T>& call) {
  const auto& [a, b, out, layout, size] = call;
  const cudaStream_t stream = device.stream();
  if (layout.is_linear()) {
    const bool aligned = start_on_16_bytes(a, b, out);
    const int64_t packs = aligned ? size / Pack<T>::size : 0;
    add_linear_kernel<T>
        <<<grid_size(aligned ? packs + 1 : size, kThreads), kThreads, 0, stream>>>(a, b, out, size, packs);
  } else if (size <= int64_t(UINT32_MAX)) {
    add_strided_kernel<T, uint32_t><<<grid_size(size, kThreads), kThreads, 0, stream>>>(a, b, out, layout, size);
  } else {
    add_strided_kernel<T, uint64_t><<<grid_size(size, kThreads), kThreads, 0, stream>>>(a, b, out, layout, size);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("add_out", TORCH_BOX(&add_out<Cuda>)); }

}  // namespace arr_coc
