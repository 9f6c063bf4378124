// misbehaving::act(x): does what x's first element says. 0 doubles it, 1 dies of SIGSEGV, 2 stalls, 3 raises.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

using torch::stable::Tensor;

Tensor act(const Tensor& x) {
  const float* in = static_cast<const float*>(x.const_data_ptr());
  const float what = x.numel() > 0 ? in[0] : 0;
  if (what == 1) {
    std::fputs("misbehaving: about to crash\n", stderr);
    std::raise(SIGSEGV);
  }
  if (what == 2) sleep(60);
  STD_TORCH_CHECK(what != 3, "misbehaving: the first element is 3");
  Tensor y = torch::stable::empty_like(x);
  float* out = static_cast<float*>(y.mutable_data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = 2 * in[i];
  return y;
}

STABLE_TORCH_LIBRARY(misbehaving, m) { m.def("act(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(misbehaving, CPU, m) { m.impl("act", TORCH_BOX(&act)); }
