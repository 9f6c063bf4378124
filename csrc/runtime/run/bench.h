// Times calls of a model from several threads.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "exportkit/runtime.h"

namespace exportkit::run {

struct TimedCall {
  Model model;
  std::string method;
  std::vector<at::Tensor> inputs;
  std::optional<Session> session;  // each call runs on a copy of it
};

struct Timing {
  size_t calls;
  double median_ms, p99_ms, calls_per_second;
};

// A call's time ends when its outputs are computed, on CUDA too; the copy of a session and of inputs that are written
// is not in it. Rethrows a call's exception.
Timing bench(const TimedCall& call, double seconds, int64_t threads);

}  // namespace exportkit::run
