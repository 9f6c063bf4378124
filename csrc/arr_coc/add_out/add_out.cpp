#include "arr_coc/add_out/add_out.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.h"

namespace arr_coc {
namespace {

// Elements [begin, end) in the layout's order, one run along the innermost dimension at a time.
template <class T>
void add_strided(const T* a, const T* b, T* out, const AddLayout& layout, int64_t begin, int64_t end) {
  const int inner = layout.rank - 1;
  const int64_t a_step = layout.stride[AddLayout::kA][inner], b_step = layout.stride[AddLayout::kB][inner],
                out_step = layout.stride[AddLayout::kOut][inner];
  while (begin < end) {
    int64_t offset[AddLayout::kTensors] = {}, index = begin;
    const int64_t run = std::min(end - begin, layout.size[inner] - begin % layout.size[inner]);
    for (int d = inner; d >= 0; --d) {
      for (int t = 0; t < AddLayout::kTensors; ++t) offset[t] += index % layout.size[d] * layout.stride[t][d];
      index /= layout.size[d];
    }
    const T* a_run = a + offset[AddLayout::kA];
    const T* b_run = b + offset[AddLayout::kB];
    T* out_run = out + offset[AddLayout::kOut];
    for (int64_t i = 0; i < run; ++i)
      out_run[i * out_step] = store<T>(load(a_run[i * a_step]) + load(b_run[i * b_step]));
    begin += run;
  }
}

}  // namespace

template <class T>
void run(const Cpu&, const AddOut<T>& call) {
  parallel_rows(call.size, 1, [&](int64_t begin, int64_t end) {
    if (!call.layout.is_linear()) return add_strided(call.a, call.b, call.out, call.layout, begin, end);
    map_here(Add{}, call.out + begin, end - begin, call.a + begin, call.b + begin);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) { m.def("add_out(Tensor a, Tensor b, Tensor(a!) out) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("add_out", TORCH_BOX(&add_out<Cpu>)); }

}  // namespace arr_coc
