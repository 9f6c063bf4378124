// Exposes compiled code as dispatcher operators, which torch.ops calls without the GIL.
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <tuple>

#include "package/c_api.h"
#include "package/fork_gate.h"
#include "runtime/code.h"
#include "runtime/handles.h"
#include "runtime/impl.h"
#include "runtime/joined_steps.h"
#include "runtime/streams.h"
#include "runtime/weights.h"

namespace exportkit {
namespace {

using Tensors = std::vector<at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

std::shared_ptr<const Code> code(int64_t handle) {
  auto found = handles<const Code>().get(handle);
  TORCH_CHECK(found, "handle ", handle, " does not belong to an open model");
  return found;
}

CudaGraphs cuda_graphs(const std::string& name) {
  if (name == "first-use") return CudaGraphs::kOnFirstUse;
  return name == "captured" ? CudaGraphs::kCaptured : CudaGraphs::kNone;
}

int64_t open_target(const std::string& library, c10::Device device, int64_t runners, const std::string& graphs,
                    const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
                    const std::vector<int64_t>& written) {
  const Work work;
  TORCH_CHECK(names.size() == tensors.size(), names.size(), " names for ", tensors.size(), " constants");
  Constants constants;
  for (size_t i = 0; i < names.size(); ++i) constants.emplace(names[i], tensors[i]);
  const CodeOptions options{device, runners, cuda_graphs(graphs), written};
  return handles<const Code>().add(std::make_shared<const Code>(library, options, std::move(constants)));
}

// --- several requests in one call, from the CPU's memory and back ----------------------------------------------------

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

// Joins the inputs of the requests along axis 0, waits for a runner, runs them on the current stream, waits for them,
// and returns the outputs of these numbers: on the CPU, contiguous; a GPU writes to pinned memory. With them, the
// seconds that it took to bring the inputs to the device, to wait for a runner, to run, and to bring the outputs back.
//
// `tensors` has all inputs of the first request, then all of the second; each is contiguous, on the CPU, and what the
// package allows. A single request may have scalar inputs. A server calls this without Python's lock; if it made each
// step from Python, it would wait for the lock after each. Of a method with state, `states` has the tensors that it
// uses of the first request's session, then of the second's, on the device: the code gets their rows together, and what
// it wrote, `written` by place, goes back. Throws c10::Error if the tensors do not fit together, and what Code::run
// throws; no session was changed then.
std::tuple<Tensors, double, double, double, double> run_requests(int64_t handle, const Tensors& tensors,
                                                                 int64_t requests, const std::vector<int64_t>& outputs,
                                                                 const Tensors& states,
                                                                 const std::vector<int64_t>& written) {
  const Work work;
  const std::shared_ptr<const Code> called = code(handle);
  const Code& code = *called;
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
  Tensors answers;
  for (const int64_t output : outputs) {
    TORCH_CHECK(output >= 0 && output < int64_t(found.size()), "there is no output ", output, ": the model has ",
                found.size());
    answers.push_back(fetch(found[size_t(output)]));
  }
  wait_for_stream(device);
  return {std::move(answers), seconds(joined - started), seconds(began - joined), seconds(ran - began),
          seconds(Clock::now() - ran)};
}

// --- which requests may be in one call -------------------------------------------------------------------------------

// `package` is the address of an open ek_package, `methods` has the code of each of its methods.
std::tuple<int64_t, std::string, std::string, bool> try_rows_of(int64_t package, const std::string& target,
                                                                c10::Device device, const std::vector<int64_t>& methods,
                                                                const std::string& name, int64_t most) {
  const Work work;
  CurrentCode::Methods loaded;
  for (const int64_t handle : methods) loaded.push_back(code(handle));
  const PackageReader& reader = reinterpret_cast<const ek_package*>(package)->reader;
  const Model model(std::make_shared<Model::Impl>(reader, target, device, std::move(loaded)));
  const MethodInfo& method = model.method(name);
  TriedRows tried = try_rows(model, method, most);
  const std::string dimension = tried.most > 0 ? method.dimensions[method.row_dimension.value()].name : "";
  return {tried.most, dimension, std::move(tried.reason), tried.bit_equal};
}

}  // namespace

// Registered for all dispatch keys, so that autograd adds nothing to a call.
TORCH_LIBRARY(exportkit, m) {
  m.def(
      "open_target(str library, Device device, int runners, str graphs, str[] names, Tensor[] constants, "
      "int[] written) -> int",
      open_target);
  m.def("copied_together(Tensor[] weights, Device device) -> Tensor[]", [](const Tensors& weights, c10::Device device) {
    const Work work;
    return copied_together(weights, device);
  });
  m.def("run(int handle, Tensor[] inputs, Tensor? refused=None) -> Tensor[]",
        [](int64_t handle, const Tensors& inputs, const MaybeTensor& refused) {
          const Work work;
          return code(handle)->run(inputs, refused);
        });
  m.def("session_memory(int handle) -> Tensor?", [](int64_t handle) { return code(handle)->session_memory(); });
  m.def("look(int handle, Tensor? refused=None) -> ()",
        [](int64_t handle, const MaybeTensor& refused) { code(handle)->look(refused); });
  m.def("capture(int handle, Tensor[] arguments, int own) -> Tensor[]",
        [](int64_t handle, const Tensors& arguments, int64_t own) {
          const Work work;
          return code(handle)->capture(arguments, static_cast<size_t>(own));
        });
  m.def("capture_as(int handle, int other) -> ()", [](int64_t handle, int64_t other) {
    const Work work;
    code(handle)->capture_as(*code(other));
  });
  m.def("graph_report(int handle) -> str", [](int64_t handle) { return code(handle)->graph_report(); });
  m.def("why_no_graphs() -> str", [] {
    const char* const reason = why_no_cuda_recorder();
    return std::string(reason == nullptr ? "" : reason);
  });
  m.def("close(int handle) -> ()", [](int64_t handle) {
    const Work work;
    handles<const Code>().remove(handle);
  });
  m.def(
      "run_requests(int handle, Tensor[] tensors, int requests, int[] outputs, Tensor[] states, int[] written) -> "
      "(Tensor[], float, float, float, float)",
      run_requests);
  m.def("try_rows(int package, str target, Device device, int[] methods, str name, int most) -> (int, str, str, bool)",
        try_rows_of);
}

}  // namespace exportkit
