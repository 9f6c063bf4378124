#include "runtime/batches.h"

#include <ATen/ops/empty.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <optional>

namespace exportkit {
namespace {

at::Tensor empty_on_cpu(at::IntArrayRef sizes, at::ScalarType dtype, bool pinned) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).pinned_memory(pinned));
}

// Makes room for the rows of all parts. A part that is alone may be a scalar.
at::Tensor empty_for(const std::vector<const at::Tensor*>& parts, bool pinned) {
  const at::Tensor& first = *parts.front();
  auto sizes = first.sizes().vec();
  for (const at::Tensor* part : parts) {
    TORCH_CHECK(part->device().is_cpu() && part->is_contiguous(), "a request's tensor is not contiguous on the CPU");
    if (part == parts.front()) continue;
    TORCH_CHECK(part->scalar_type() == first.scalar_type() && !sizes.empty() && part->dim() == first.dim() &&
                    part->sizes().slice(1) == first.sizes().slice(1),
                "the tensors of the requests do not fit together");
    sizes[0] += part->size(0);
  }
  return empty_on_cpu(sizes, first.scalar_type(), pinned);
}

}  // namespace

std::vector<at::Tensor> join(const std::vector<at::Tensor>& tensors, int64_t requests, c10::Device device) {
  TORCH_CHECK(requests > 0 && int64_t(tensors.size()) % requests == 0, tensors.size(), " tensors of ", requests,
              " requests");
  const size_t inputs = tensors.size() / size_t(requests);
  std::vector<at::Tensor> joined;
  for (size_t place = 0; place < inputs; ++place) {
    std::vector<const at::Tensor*> parts;
    for (size_t i = place; i < tensors.size(); i += inputs) parts.push_back(&tensors[i]);
    const at::Tensor whole = empty_for(parts, !device.is_cpu());
    char* to = static_cast<char*>(whole.mutable_data_ptr());
    for (const at::Tensor* part : parts) {
      if (part->nbytes() != 0) std::memcpy(to, part->const_data_ptr(), part->nbytes());
      to += part->nbytes();
    }
    // torch uses the pinned memory again when the copy has ended, and not before.
    joined.push_back(whole.to(whole.options().device(device).pinned_memory(false), /*non_blocking=*/true));
  }
  return joined;
}

std::vector<at::Tensor> fetch(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> fetched;
  std::optional<c10::Device> device;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device().is_cpu()) {
      fetched.push_back(tensor.contiguous());
      continue;
    }
    device = tensor.device();
    fetched.push_back(empty_on_cpu(tensor.sizes(), tensor.scalar_type(), /*pinned=*/true));
    fetched.back().copy_(tensor, /*non_blocking=*/true);
  }
  if (device) c10::impl::VirtualGuardImpl(device->type()).getStream(*device).synchronize();
  return fetched;
}

}  // namespace exportkit
