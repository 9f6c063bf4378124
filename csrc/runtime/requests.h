// Runs several requests in one call of a model, from the CPU's memory and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/code.h"

namespace exportkit {

struct Answers {
  std::vector<at::Tensor> outputs;  // on the CPU, contiguous; a GPU writes to pinned memory
  // What it took to bring the inputs to the device, to wait for a runner, to run, and to bring the outputs back.
  double input_seconds, wait_seconds, run_seconds, output_seconds;
};

// Joins the inputs of the requests along axis 0, waits for a runner, runs them on the current stream, waits for them,
// and returns the outputs of these numbers. `tensors` has all inputs of the first request, then all of the second; each
// is contiguous, on the CPU, and what the package allows. A single request may have scalar inputs. A server calls this
// without Python's lock; if it made each step from Python, it would wait for the lock after each. Of a method with
// state, `states` has the tensors that it uses of the first request's session, then of the second's, on the device: the
// code gets their rows together, and what it wrote, `written` by place, goes back. Throws c10::Error if the tensors do
// not fit together, and what Code::run throws; no session was changed then.
Answers run_requests(const Code& code, const std::vector<at::Tensor>& tensors, int64_t requests,
                     const std::vector<int64_t>& outputs, const std::vector<at::Tensor>& states,
                     const std::vector<int64_t>& written);

}  // namespace exportkit
