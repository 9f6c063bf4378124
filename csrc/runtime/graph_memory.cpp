#include "runtime/graph_memory.h"

#include <ATen/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace exportkit {
namespace {

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.contiguous().reshape(-1).view(at::kByte); }

}  // namespace

Tensors like(const Tensors& tensors, c10::Device device) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    made.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)));
  }
  return made;
}

bool laid_out_as(const Tensors& tensors, const Tensors& others) {
  return std::ranges::equal(tensors, others, [](const at::Tensor& one, const at::Tensor& other) {
    return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() && one.strides() == other.strides();
  });
}

Tensors apart_like(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor memory = at::empty({tensor.numel() + 1}, tensor.options());
    made.push_back(memory.narrow(0, 0, tensor.numel()).view(tensor.sizes()));
  }
  return made;
}

Span span_of(const at::Tensor& tensor) {
  size_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) last += (tensor.size(axis) - 1) * tensor.stride(axis);
  return {tensor.data_ptr(), tensor.numel() == 0 ? 0 : (last + 1) * tensor.itemsize()};
}

std::vector<Span> spans_of(const Tensors& tensors) {
  std::vector<Span> spans;
  for (const at::Tensor& tensor : tensors) spans.push_back(span_of(tensor));
  return spans;
}

void set_zero(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) tensor.zero_();
}

void set_example(const Tensors& tensors) {
  set_zero(tensors);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_floating_point() || tensor.numel() == 0) continue;
    const double golden = 0.6180339887498949;
    const at::Tensor steps =
        at::arange(0, golden * (tensor.numel() - 0.5), golden, tensor.options().dtype(at::kDouble));
    tensor.copy_(steps.frac_().view(tensor.sizes()));
  }
}

void set_noise(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const Span span = span_of(tensor);
    const auto bytes = static_cast<int64_t>(span.bytes);
    if (bytes > 0) at::from_blob(span.address, bytes, tensor.options().dtype(at::kByte)).fill_(0xA5);
  }
}

Tensors tellable(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    made.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
    if (any_bit(tensor)) {
      made.back().copy_(tensor);
    } else {
      set_example({made.back()});
    }
  }
  return made;
}

// Of bytes, because not every dtype has `any`.
bool any_bit(const at::Tensor& tensor) { return bytes_of(tensor).any().item<bool>(); }

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) return false;
  return at::equal(bytes_of(one), bytes_of(other));
}

}  // namespace exportkit
