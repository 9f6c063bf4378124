#include "ops/add_out/add_out.h"

#include <torch/csrc/stable/library.h>

#include "common/map.h"

namespace arr_coc {
namespace {

struct Add {
  template <class A>
  ARR_COC_FUNCTION A operator()(A a, A b) const {
    return a + b;
  }
};

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

void add_out_cpu(const Tensor& a, const Tensor& b, Tensor out) {
  check_add_out(a, b, out);
  const int64_t size = out.numel();
  if (size == 0) return;
  const Tensor x = unless_overwritten(a, out), y = unless_overwritten(b, out);
  const AddLayout layout = add_layout(x, y, out);
  dispatch_floating(a.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* left = static_cast<const T*>(x.const_data_ptr());
    const T* right = static_cast<const T*>(y.const_data_ptr());
    T* sum = static_cast<T*>(out.mutable_data_ptr());
    parallel_rows(size, 1, [&](int64_t begin, int64_t end) {
      if (!layout.is_linear()) return add_strided(left, right, sum, layout, begin, end);
      map(Add{}, sum + begin, end - begin, left + begin, right + begin);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) { m.def("add_out(Tensor a, Tensor b, Tensor(a!) out) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("add_out", TORCH_BOX(&add_out_cpu)); }

}  // namespace arr_coc
