#include "runtime/device_weights.h"

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace exportkit {
namespace {

constexpr int64_t kAlignment = 512;  // as torch's allocator: kernels are chosen by their arguments' alignment

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Weights on_device(const Target& target, const Weights& weights, c10::Device device) {
  Weights used;
  // The manifest was checked: the weight exists and has a record.
  for (const auto& [method, constants] : target.constants) {
    for (const auto& [constant, name] : constants) used.emplace(name, weights.at(name));
  }
  if (device.is_cpu()) return used;
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device);
  int64_t bytes = 0;
  for (const auto& [name, tensor] : used) bytes += aligned(static_cast<int64_t>(tensor.nbytes()));
  const at::Tensor memory = at::empty({bytes}, at::device(device).dtype(at::kByte));
  int64_t place = 0;
  for (auto& [name, tensor] : used) {
    const auto size = static_cast<int64_t>(tensor.nbytes());
    const at::Tensor typed = memory.narrow(0, place, size).view(tensor.scalar_type());
    const at::Tensor copy = typed.as_strided(tensor.sizes(), tensor.strides());
    copy.copy_(tensor);
    tensor = copy;
    place += aligned(size);
  }
  // Calls do not wait for the stream that copies.
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  return used;
}

}  // namespace exportkit
