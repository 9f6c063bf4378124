#include <torch/csrc/stable/library.h>

#include "arr_coc/add_out/add_out.h"
#include "arr_coc/common/map.cuh"

namespace arr_coc {
namespace {

constexpr int kThreads = 256;

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
    using A = accumulate_t<T>;
    out[out_offset] = T(Add()(A(a[a_offset]), A(b[b_offset])));
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const AddOut<T>& call) {
  const auto& [a, b, out, layout, size] = call;
  if (layout.is_linear()) return map(device, Add(), out, size, a, b);
  const auto kernel = size <= int64_t(UINT32_MAX) ? add_strided_kernel<T, uint32_t> : add_strided_kernel<T, uint64_t>;
  device.launch(kernel, {grid_size(size, kThreads), kThreads}, a, b, out, layout, size);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("add_out", TORCH_BOX(&add_out<Cuda>)); }

}  // namespace arr_coc
