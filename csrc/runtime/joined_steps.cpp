#include "runtime/joined_steps.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <bit>
#include <cstring>
#include <numeric>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

using Tensors = std::vector<at::Tensor>;

// Begins a call, which notes refused values in the workspace's own memory, where no other call looks.
Tensors begin_call(const Model::Impl& model, size_t method, const Tensors& inputs, StateInUse state,
                   Workspace& workspace) {
  if (!workspace.refused) workspace.refused = model.code.get(method)->session_memory();
  state.refused = workspace.refused;
  state.last = &workspace.outputs;
  return model.run(method, inputs, &state);
}

void wait_for_call(const Model::Impl& model, size_t method, const Workspace& workspace) {
  model.wait();
  model.look(method, workspace.refused);
}

// Makes room for the state of so many rows. Memory grows to a power of two, so that it rarely grows.
void make_room(Workspace& workspace, const Tensors& like, int64_t rows) {
  if (rows <= workspace.rows && !workspace.state.empty()) return;
  workspace.state.clear(), workspace.rows = 0;
  const auto grown = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  for (const at::Tensor& state : like) {
    std::vector<int64_t> sizes = state.sizes().vec();
    sizes[0] = grown;
    workspace.state.push_back(at::empty(sizes, state.options()));
  }
  workspace.rows = grown;
}

// Copies the sessions' tensors at these places into those of all, or back. A GPU gets one launch for many tensors.
void copy_state(const Tensors& all, const SessionStates& sessions, const std::vector<int64_t>& places, bool back) {
  Tensors to, from;
  for (const int64_t index : places) {
    const auto i = static_cast<size_t>(index);
    char* place = static_cast<char*>(all[i].mutable_data_ptr());
    int64_t row = 0;
    for (const Tensors& session : sessions) {
      const at::Tensor& own = session[i];
      if (own.nbytes() == 0) continue;
      if (own.is_cpu()) {
        std::memcpy(back ? own.mutable_data_ptr() : place, back ? place : own.const_data_ptr(), own.nbytes());
        place += own.nbytes();
        continue;
      }
      (back ? to : from).push_back(own);
      (back ? from : to).push_back(all[i].narrow(0, row, own.size(0)));
      row += own.size(0);
    }
  }
  if (!to.empty()) at::_foreach_copy_(to, from, /*non_blocking=*/true);
}

// By place in what a method uses.
std::vector<int64_t> written_state(const std::vector<StateUse>& uses) {
  std::vector<int64_t> written;
  for (size_t i = 0; i < uses.size(); ++i) {
    if (uses[i].written) written.push_back(static_cast<int64_t>(i));
  }
  return written;
}

}  // namespace

std::vector<at::Tensor> gather_state(const SessionStates& sessions, Workspace& workspace) {
  int64_t rows = 0;
  for (const Tensors& session : sessions) rows += session.front().size(0);
  make_room(workspace, sessions.front(), rows);
  Tensors all;
  for (const at::Tensor& state : workspace.state) all.push_back(state.narrow(0, 0, rows));
  std::vector<int64_t> places(all.size());
  std::iota(places.begin(), places.end(), 0);
  copy_state(all, sessions, places, /*back=*/false);
  return all;
}

void scatter_state(const std::vector<at::Tensor>& all, const SessionStates& sessions,
                   const std::vector<int64_t>& written) {
  copy_state(all, sessions, written, /*back=*/true);
}

std::vector<at::Tensor> run_joined(const Model::Impl& model, size_t method, const std::vector<Session::Impl*>& sessions,
                                   const std::vector<at::Tensor>& inputs, Workspace& workspace) {
  const MethodInfo& info = model.methods[method];
  const int64_t rows = inputs.front().size(0);
  SessionStates states;
  for (const Session::Impl* session : sessions) states.push_back(session->methods[method].tensors);
  StateInUse all;
  all.sizes = {{info.dimensions[info.row_dimension.value()].name, rows}};
  all.tensors = gather_state(states, workspace);
  Tensors outputs = begin_call(model, method, inputs, all, workspace);
  wait_for_call(model, method, workspace);
  for (Session::Impl* session : sessions) session->need_whole();  // an earlier call has ended only now
  check_outputs(info, outputs, rows);
  try {
    scatter_state(all.tensors, states, written_state(model.manifest().methods[method].state));
  } catch (const std::exception& error) {
    for (Session::Impl* session : sessions) {
      session->break_for(std::string("its state was not written: ") + error.what());
    }
    throw;
  }
  return outputs;
}

std::vector<at::Tensor> run_stateless(const Model::Impl& model, size_t method, const std::vector<at::Tensor>& inputs,
                                      bool several, Workspace& workspace) {
  Tensors outputs = begin_call(model, method, inputs, {}, workspace);
  if (several) wait_for_call(model, method, workspace);
  check_outputs(model.methods[method], outputs, several ? inputs.front().size(0) : -1);
  return outputs;
}

at::Tensor joined_rows(const std::vector<at::Tensor>& parts) {
  auto sizes = parts.front().sizes().vec();
  sizes[0] = 0;
  Tensors bytes;
  for (const at::Tensor& part : parts) {
    sizes[0] += part.size(0);
    bytes.push_back(part.view({-1}).view(at::kByte));
  }
  return at::cat(bytes).view(parts.front().scalar_type()).view(sizes);
}

void check_outputs(const MethodInfo& method, const std::vector<at::Tensor>& outputs, int64_t rows) {
  if (outputs.size() != method.outputs.size()) {
    throw Error(errors::kModelRun, "the compiled code returned " + std::to_string(outputs.size()) +
                                       " tensors; the manifest lists " + std::to_string(method.outputs.size()));
  }
  for (size_t i = 0; rows >= 0 && i < outputs.size(); ++i) {
    if (outputs[i].dim() > 0 && outputs[i].size(0) == rows) continue;
    throw Error(errors::kModelRun, concat("the compiled code returned ", describe(outputs[i]), " for `",
                                          method.outputs[i].name, "`, which does not have ", rows, " rows"));
  }
}

}  // namespace exportkit
