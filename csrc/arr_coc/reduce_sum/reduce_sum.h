#pragma once

#include <utility>
#include <vector>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

// `x` as [outer, size, inner], in elements. The dimensions before and after the summed one are merged into one each.
struct SumLayout {
  int64_t outer = 1, size = 0, inner = 1;
  int64_t outer_stride = 0, stride = 0, inner_stride = 0;

  int64_t outputs() const { return outer * inner; }
  int64_t offset(int64_t output) const { return output / inner * outer_stride + output % inner * inner_stride; }
};

// Makes one dimension of [first, last) if the strides allow it.
inline bool collapse(const Tensor& x, int64_t first, int64_t last, int64_t& size, int64_t& stride) {
  for (int64_t dim = last - 1; dim >= first; --dim) {
    if (x.size(dim) == 1) continue;
    if (size == 1) {
      stride = x.stride(dim);
    } else if (x.numel() > 0 && x.stride(dim) != stride * size) {
      return false;
    }
    size *= x.size(dim);
  }
  return true;
}

// The layout of `x`. If there is none, makes `x` contiguous.
inline SumLayout sum_layout(Tensor& x, int64_t dim) {
  SumLayout layout;
  layout.size = x.size(dim), layout.stride = x.stride(dim);
  if (!collapse(x, 0, dim, layout.outer, layout.outer_stride) ||
      !collapse(x, dim + 1, x.dim(), layout.inner, layout.inner_stride)) {
    x = torch::stable::contiguous(x);
    return sum_layout(x, dim);
  }
  if (layout.inner == 1) {
    std::swap(layout.inner, layout.outer);
    std::swap(layout.inner_stride, layout.outer_stride);
  }
  return layout;
}

// `out` is [outer, inner]; neither it nor the summed dimension is empty.
template <class T>
struct ReduceSum {
  const T* x;
  T* out;
  const SumLayout& layout;
};

template <class Device>
Tensor reduce_sum(const Tensor& x, int64_t dim) {
  const char* op = "reduce_sum";
  check_floating(op, "x", x);
  check(x.dim() >= 1, op, ": x must have at least one dimension, got shape []");
  check(-x.dim() <= dim && dim < x.dim(), op, ": dim must be in [", -x.dim(), ", ", x.dim() - 1, "], got ", dim);
  const Device device(x);
  dim += dim < 0 ? x.dim() : 0;
  Tensor in = x;
  const SumLayout layout = sum_layout(in, dim);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.erase(sizes.begin() + dim);
  Tensor sum = allocate(x, sizes);
  if (layout.outputs() == 0) return sum;
  if (layout.size == 0) return torch::stable::zero_(sum);
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Tensor& read = in;
    run(device, ReduceSum<T>{data_of<T>(read), data_of<T>(sum), layout});
  });
  return sum;
}

}  // namespace arr_coc
