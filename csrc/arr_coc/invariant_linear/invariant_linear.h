#pragma once

#include <algorithm>
#include <optional>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

// The order of a sum. It is divided into parts, and a part is added up from its first product to its last, one fused
// multiply-add each, and to zero the parts are added, from the first to the last. The order depends on the number of
// products alone, so that a row has the same bits beside any other rows. Parts let several blocks share a long sum.
struct SumOrder {
  static constexpr int64_t kMostParts = 8;    // as many as a cluster has blocks on every GPU
  static constexpr int64_t kLeastPart = 256;  // products
  static constexpr int64_t kStep = 16;        // of which every part but the last is a multiple

  int64_t products, part_length;

  explicit SumOrder(int64_t products) : products(products) {
    const int64_t parts = std::clamp<int64_t>(products / kLeastPart, 1, kMostParts);
    part_length = std::max<int64_t>((products + parts * kStep - 1) / (parts * kStep) * kStep, kStep);
  }

  // At most kMostParts; at least 1.
  int64_t parts() const { return std::max<int64_t>((products + part_length - 1) / part_length, 1); }
};

// `bias` may be null.
template <class T>
struct InvariantLinear {
  const T *x, *weight, *bias;
  T* out;
  int64_t rows, in, width;  // `width` numbers in a row of `out`
  SumOrder order;
};

template <class Device>
Tensor invariant_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const char* op = "invariant_linear";
  check_floating(op, "x", x);
  check(x.dim() > 0, op, ": x must be [..., I], got shape ", shape_of(x));
  check_rank(op, "weight", weight, 2, "[O, I]");
  check_alike(op, "x", x, "weight", weight);
  check_same_size(op, "I", "weight", weight.size(1), "x", x.size(-1));
  if (bias) {
    check_rank(op, "bias", *bias, 1, "[O]");
    check_alike(op, "x", x, "bias", *bias);
    check_same_size(op, "O", "bias", bias->size(0), "weight", weight.size(0));
  }
  const Device device(x);
  const Tensor rows = as_contiguous(x), w = as_contiguous(weight);
  const std::optional<Tensor> b = as_contiguous(bias);
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = w.size(0);
  Tensor out = allocate(rows, sizes);
  if (out.numel() == 0) return out;
  dispatch_floating(rows.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    run(device, InvariantLinear<T>{data_of<T>(rows), data_of<T>(w), data_of<T>(b), data_of<T>(out),
                                   out.numel() / w.size(0), w.size(1), w.size(0), SumOrder(w.size(1))});
  });
  return out;
}

}  // namespace arr_coc
