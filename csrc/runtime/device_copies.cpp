#include "runtime/device_copies.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace exportkit {
namespace {

constexpr uint64_t kWord = sizeof(int64_t);

bool in_words(const void* address, uint64_t bytes) {
  return (reinterpret_cast<uintptr_t>(address) | bytes) % kWord == 0;
}

}  // namespace

void DeviceCopies::begin() {
  if (copies_.empty()) return;
  const bool words = std::ranges::all_of(
      copies_, [](const Copy& copy) { return in_words(copy.to, copy.bytes) && in_words(copy.from, copy.bytes); });
  const auto options = at::TensorOptions(words ? at::kLong : at::kByte).device(device_);
  const auto view = [&](const void* data, uint64_t bytes) {
    const auto size = static_cast<int64_t>(words ? bytes / kWord : bytes);
    return at::for_blob(const_cast<void*>(data), {size}).options(options).target_device(device_).make_tensor();
  };
  std::vector<at::Tensor> to, from;
  for (const Copy& copy : copies_) {
    to.push_back(view(copy.to, copy.bytes));
    from.push_back(view(copy.from, copy.bytes));
  }
  at::_foreach_copy_(to, from, /*non_blocking=*/true);
  copies_.clear();
}

}  // namespace exportkit
