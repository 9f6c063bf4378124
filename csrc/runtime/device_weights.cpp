#include "runtime/device_weights.h"

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "package/mapping.h"
#include "runtime/staged_copies.h"
#include "runtime/streams.h"

namespace exportkit {
namespace {

constexpr uint64_t kAlignment = 512;  // as torch's allocator: kernels are chosen by their arguments' alignment

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

std::vector<at::Tensor> copied_together(const std::vector<at::Tensor>& weights, c10::Device device) {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device);
  std::vector<StagedPart> parts;
  uint64_t bytes = 0;
  for (const at::Tensor& weight : weights) {
    parts.push_back({static_cast<const char*>(weight.const_data_ptr()), bytes, weight.nbytes()});
    bytes += aligned(weight.nbytes());
  }
  const at::Tensor memory = at::empty({static_cast<int64_t>(bytes)}, at::device(device).dtype(at::kByte));
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto place = static_cast<int64_t>(parts[i].place), size = static_cast<int64_t>(parts[i].bytes);
    const at::Tensor typed = memory.narrow(0, place, size).view(weights[i].scalar_type());
    copies.push_back(typed.as_strided(weights[i].sizes(), weights[i].strides()));
  }
  // The current stream may still use what the memory held before. No other stream waits for the copies.
  const auto staged = [&] {
    if (!device.is_cuda() || bytes < kWorthStaging) return false;
    wait_for_stream(device);
    char* const to = static_cast<char*>(memory.mutable_data_ptr());
    return copy_staged(memory.device().index(), to, parts, read_weights, lanes_for(bytes));
  };
  if (staged()) return copies;
  for (size_t i = 0; i < weights.size(); ++i) copies[i].copy_(weights[i]);
  wait_for_stream(device);
  return copies;
}

Weights on_device(const Target& target, const Weights& weights, c10::Device device) {
  Weights used;
  // The manifest was checked: the weight exists and has a record.
  for (const auto& [method, constants] : target.constants) {
    for (const auto& [constant, name] : constants) used.emplace(name, weights.at(name));
  }
  if (device.is_cpu()) return used;
  std::vector<at::Tensor> given;
  for (const auto& [name, tensor] : used) given.push_back(tensor);
  const std::vector<at::Tensor> copies = copied_together(given, device);
  auto copy = copies.begin();
  for (auto& [name, tensor] : used) tensor = *copy++;
  return used;
}

}  // namespace exportkit
