// Times calls of a model from several threads.
#pragma once

#include "exportkit/runtime.h"

namespace exportkit::run {

struct Timing {
  size_t calls;
  double median_ms, p99_ms, calls_per_second;
};

// A call's time ends when its outputs are computed, on CUDA too. Rethrows a call's exception.
Timing bench(const Model& model, const std::vector<at::Tensor>& inputs, double seconds, int64_t threads);

}  // namespace exportkit::run
