// meeting::meet(x): doubles x, once as many calls are in it at a time as x's first element says, from whatever threads.
// Where nobody comes within a minute, or the element is below 0, it raises. meeting::waiting() is how many wait in it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

using torch::stable::Tensor;

std::mutex mutex;
std::condition_variable somebody;
int inside = 0;
int leaving = 0;

Tensor meet(const Tensor& x) {
  const float* in = static_cast<const float*>(x.const_data_ptr());
  const int expected = x.numel() > 0 ? static_cast<int>(in[0]) : 1;
  STD_TORCH_CHECK(expected >= 0, "meeting: the first element is below 0");
  if (expected > 1) {
    std::unique_lock lock(mutex);
    if (++inside == expected) {
      leaving += expected;
      somebody.notify_all();
    }
    const bool met = somebody.wait_for(lock, std::chrono::minutes(1), [] { return leaving > 0; });
    --inside;
    STD_TORCH_CHECK(met, "meeting: nobody came");
    --leaving;
  }
  Tensor y = torch::stable::empty_like(x);
  float* out = static_cast<float*>(y.mutable_data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = 2 * in[i];
  return y;
}

int64_t waiting() {
  const std::lock_guard lock(mutex);
  return inside;
}

STABLE_TORCH_LIBRARY(meeting, m) {
  m.def("meet(Tensor x) -> Tensor");
  m.def("waiting() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(meeting, CPU, m) { m.impl("meet", TORCH_BOX(&meet)); }
STABLE_TORCH_LIBRARY_IMPL(meeting, CompositeExplicitAutograd, m) { m.impl("waiting", TORCH_BOX(&waiting)); }
