#include "runtime/requests.h"

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#include <chrono>
#include <cstring>

#include "runtime/joined_steps.h"
#include "runtime/streams.h"

namespace exportkit {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor pinned(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).pinned_memory(true));
}

// Returns the sizes of all parts together.
std::vector<int64_t> joined_sizes(const Tensors& parts) {
  const at::Tensor& first = parts.front();
  auto sizes = first.sizes().vec();
  for (const at::Tensor& part : parts) {
    TORCH_CHECK(part.device().is_cpu() && part.is_contiguous(), "a request's tensor is not contiguous on the CPU");
    if (&part == &first) continue;
    TORCH_CHECK(part.scalar_type() == first.scalar_type() && !sizes.empty() && part.dim() == first.dim() &&
                    part.sizes().slice(1) == first.sizes().slice(1),
                "the tensors of the requests do not fit together");
    sizes[0] += part.size(0);
  }
  return sizes;
}

// The copy may still run when this returns. torch uses the pinned memory again when it has ended, and not before.
at::Tensor join_on_gpu(const Tensors& parts, at::IntArrayRef sizes, c10::Device device) {
  const at::Tensor whole = pinned(sizes, parts.front().scalar_type());
  char* to = static_cast<char*>(whole.mutable_data_ptr());
  for (const at::Tensor& part : parts) {
    if (part.nbytes() != 0) std::memcpy(to, part.const_data_ptr(), part.nbytes());
    to += part.nbytes();
  }
  return whole.to(whole.options().device(device).pinned_memory(false), /*non_blocking=*/true);
}

Tensors join(const Tensors& tensors, int64_t requests, c10::Device device) {
  TORCH_CHECK(requests > 0 && int64_t(tensors.size()) % requests == 0, tensors.size(), " tensors of ", requests,
              " requests");
  const size_t inputs = tensors.size() / size_t(requests);
  Tensors joined;
  for (size_t place = 0; place < inputs; ++place) {
    Tensors parts;
    for (size_t i = place; i < tensors.size(); i += inputs) parts.push_back(tensors[i]);
    const auto sizes = joined_sizes(parts);
    if (!device.is_cpu()) {
      joined.push_back(join_on_gpu(parts, sizes, device));
    } else {
      joined.push_back(parts.size() == 1 ? parts.front() : joined_rows(parts));
    }
  }
  return joined;
}

// The states of each request's session.
SessionStates sessions_of(const Tensors& tensors, const Tensors& states, int64_t requests) {
  TORCH_CHECK(int64_t(states.size()) % requests == 0, states.size(), " state tensors of ", requests, " requests");
  const size_t inputs = tensors.size() / size_t(requests), uses = states.size() / size_t(requests);
  SessionStates sessions;
  for (size_t i = 0; uses > 0 && i < size_t(requests); ++i) {
    sessions.emplace_back(states.begin() + i * uses, states.begin() + (i + 1) * uses);
    const int64_t rows = sessions.back().front().size(0);
    TORCH_CHECK(tensors[i * inputs].size(0) == rows, "a request has ", tensors[i * inputs].size(0),
                " rows, and its session ", rows);
  }
  return sessions;
}

// The copies from a GPU may still run when this returns.
at::Tensor fetch(const at::Tensor& output) {
  if (output.device().is_cpu()) return output.contiguous();
  at::Tensor fetched = pinned(output.sizes(), output.scalar_type());
  fetched.copy_(output, /*non_blocking=*/true);
  return fetched;
}

}  // namespace

Answers run_requests(const Code& code, const Tensors& tensors, int64_t requests, const std::vector<int64_t>& outputs,
                     const Tensors& states, const std::vector<int64_t>& written) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
  const c10::Device device = code.device();
  const auto started = Clock::now();
  Tensors arguments = join(tensors, requests, device);
  const SessionStates sessions = sessions_of(tensors, states, requests);
  auto workspace = code.workspaces().take();
  const auto end_of_use = c10::make_scope_exit([&] { code.workspaces().give_back(std::move(workspace)); });
  if (!sessions.empty() && !workspace->refused) workspace->refused = code.session_memory();
  const auto joined = Clock::now();
  Tensors found;
  code.turns().acquire();
  const auto began = Clock::now();
  {
    const auto end_of_turn = c10::make_scope_exit([&code] { code.turns().release(); });
    Tensors all;
    if (!sessions.empty()) all = gather_state(sessions, *workspace);
    arguments.insert(arguments.end(), all.begin(), all.end());
    found = code.run(arguments, workspace->refused, &workspace->outputs);
    wait_for_stream(device);
    code.look(workspace->refused);
    scatter_state(all, sessions, written);
  }
  const auto ran = Clock::now();
  Answers answers;
  for (const int64_t output : outputs) {
    TORCH_CHECK(output >= 0 && output < int64_t(found.size()), "there is no output ", output, ": the model has ",
                found.size());
    answers.outputs.push_back(fetch(found[size_t(output)]));
  }
  wait_for_stream(device);
  answers.input_seconds = seconds(joined - started);
  answers.wait_seconds = seconds(began - joined);
  answers.run_seconds = seconds(ran - began);
  answers.output_seconds = seconds(Clock::now() - ran);
  return answers;
}

}  // namespace exportkit
