#include "runtime/joined_steps.h"

#include "package/errors.h"
#include "runtime/inputs.h"
#include "runtime/joined_state.h"

namespace exportkit {
namespace {

using Tensors = std::vector<at::Tensor>;

// Begins a call, which notes refused values in the workspace's own memory, where no other call looks.
Tensors begin_call(const Model::Impl& model, size_t method, const Tensors& inputs, StateInUse state,
                   Workspace& workspace) {
  if (!workspace.refused) workspace.refused = model.code.get(method)->session_memory();
  state.refused = workspace.refused;
  return model.run(method, inputs, &state);
}

void wait_for_call(const Model::Impl& model, size_t method, const Workspace& workspace) {
  model.wait();
  model.look(method, workspace.refused);
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

std::vector<at::Tensor> run_joined(const Model::Impl& model, size_t method, const std::vector<Session::Impl*>& sessions,
                                   const std::vector<at::Tensor>& inputs, Workspace& workspace) {
  const MethodInfo& info = model.methods[method];
  const int64_t rows = inputs.front().size(0);
  SessionStates states;
  for (const Session::Impl* session : sessions) states.push_back(session->methods[method].tensors);
  StateInUse all{{{info.dimensions[info.row_dimension.value()].name, rows}}, gather_state(states, workspace), {}, {}};
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

void check_outputs(const MethodInfo& method, const std::vector<at::Tensor>& outputs, int64_t rows) {
  if (outputs.size() != method.outputs.size()) {
    throw Error(errors::kModelRun, "the compiled code returned " + std::to_string(outputs.size()) +
                                       " tensors; the manifest lists " + std::to_string(method.outputs.size()));
  }
  for (size_t i = 0; rows >= 0 && i < outputs.size(); ++i) {
    if (outputs[i].dim() > 0 && outputs[i].size(0) == rows) continue;
    throw Error(errors::kModelRun, "the compiled code returned " + describe(outputs[i]) + " for `" +
                                       method.outputs[i].name + "`, which does not have " + std::to_string(rows) +
                                       " rows");
  }
}

}  // namespace exportkit
