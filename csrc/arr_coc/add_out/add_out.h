#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

struct Add {
  template <class A>
  ARR_COC_FUNCTION A operator()(A a, A b) const {
    return a + b;
  }
};

constexpr int kMaxDims = 25;  // as in torch's own elementwise kernels

// Sizes and strides in elements, outermost first. Dimensions of size 1 are left out, the others ordered by the stride
// of `out`, and neighbours merged where all three tensors step from one to the next as within one dimension.
struct AddLayout {
  enum { kA, kB, kOut, kTensors };
  int rank = 0;
  int64_t size[kMaxDims];
  int64_t stride[kTensors][kMaxDims];

  bool is_linear() const {
    return rank == 0 || (rank == 1 && stride[kA][0] == 1 && stride[kB][0] == 1 && stride[kOut][0] == 1);
  }
};

// Dimensions of more than one element, from the largest stride to the smallest; returns how many.
inline int by_stride(const Tensor& tensor, std::array<int64_t, kMaxDims>& dims) {
  int count = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) != 1) dims[count++] = dim;
  std::stable_sort(dims.begin(), dims.begin() + count,
                   [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return count;
}

// Whether every stride steps past the extent of the smaller ones. No two elements of such a tensor share memory.
inline bool has_distinct_elements(const Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  std::array<int64_t, kMaxDims> dims;
  int64_t reach = 0;
  for (int d = by_stride(tensor, dims) - 1; d >= 0; --d) {
    if (tensor.stride(dims[d]) <= reach) return false;
    reach += (tensor.size(dims[d]) - 1) * tensor.stride(dims[d]);
  }
  return true;
}

// Copies an input that shares memory with `out` in another way than element by element, because it would change while
// it is read. Views that only interleave are copied too.
inline Tensor unless_overwritten(const Tensor& input, const Tensor& out) {
  const auto end_of = [](const Tensor& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    return static_cast<const char*>(tensor.const_data_ptr()) + (last + 1) * tensor.element_size();
  };
  const char* begin = static_cast<const char*>(input.const_data_ptr());
  const char* out_begin = static_cast<const char*>(out.const_data_ptr());
  if (begin >= end_of(out) || out_begin >= end_of(input)) return input;
  bool same = begin == out_begin;
  for (int64_t dim = 0; same && dim < out.dim(); ++dim)
    same = out.size(dim) == 1 || input.stride(dim) == out.stride(dim);
  return same ? input : torch::stable::clone(input);
}

inline AddLayout add_layout(const Tensor& a, const Tensor& b, const Tensor& out) {
  const Tensor* tensors[] = {&a, &b, &out};
  std::array<int64_t, kMaxDims> dims;
  const int count = by_stride(out, dims);
  AddLayout layout;
  for (int d = 0; d < count; ++d) {
    const int64_t size = out.size(dims[d]);
    const int outer = layout.rank - 1;
    bool merges = outer >= 0;
    for (int t = 0; merges && t < AddLayout::kTensors; ++t)
      merges = layout.stride[t][outer] == tensors[t]->stride(dims[d]) * size;
    const int place = merges ? outer : layout.rank++;
    layout.size[place] = merges ? layout.size[outer] * size : size;
    for (int t = 0; t < AddLayout::kTensors; ++t) layout.stride[t][place] = tensors[t]->stride(dims[d]);
  }
  return layout;
}

template <class T>
struct AddOut {
  const T *a, *b;
  T* out;
  const AddLayout& layout;
  int64_t size;
};

template <class Device>
void add_out(const Tensor& a, const Tensor& b, Tensor out) {
  const char* op = "add_out";
  check_floating(op, "a", a);
  check(a.dim() <= kMaxDims, op, ": a must have at most ", kMaxDims, " dimensions, got shape ", shape_of(a));
  check_alike(op, "a", a, "b", b);
  check_alike(op, "a", a, "out", out);
  check_same_shape(op, "a", a, "b", b);
  check_same_shape(op, "a", a, "out", out);
  check(has_distinct_elements(out), op, ": elements of out must not share memory, got shape ", shape_of(out),
        " with strides ", strides_of(out));
  if (out.numel() == 0) return;
  const Device device(out);
  const Tensor x = unless_overwritten(a, out), y = unless_overwritten(b, out);
  const AddLayout layout = add_layout(x, y, out);
  dispatch_floating(out.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, AddOut<T>{data_of<T>(x), data_of<T>(y), data_of<T>(out), layout, out.numel()});
  });
}

}  // namespace arr_coc
