// Runs one call for several sessions: gathers the rows of their state, and writes back what the call wrote.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/impl.h"

namespace exportkit {

using SessionStates = std::vector<std::vector<at::Tensor>>;  // of each session, what a method uses

// The rows of all sessions, one after another, in memory that the workspace keeps.
std::vector<at::Tensor> gather_state(const SessionStates& sessions, Workspace& workspace);
// Copies what a call wrote into `all`, the tensors at these places, back to the sessions.
void scatter_state(const std::vector<at::Tensor>& all, const SessionStates& sessions,
                   const std::vector<int64_t>& written);

// Runs a method that has rows by `row_rule`. `inputs` have the rows of all sessions, whose turns the caller holds. The
// workspace keeps the gathered state. No session changes if the call fails, or if its outputs do not have all rows:
// ModelRunError, RefusedValueError.
std::vector<at::Tensor> run_joined(const Model::Impl& model, size_t method, const std::vector<Session::Impl*>& sessions,
                                   const std::vector<at::Tensor>& inputs, Workspace& workspace);

// Runs a method without state: ModelRunError, RefusedValueError. If `several`, each output has the rows of the inputs,
// and the call has ended. Else a GPU may still run. When it has ended, `workspace.refused` has what it refused.
std::vector<at::Tensor> run_stateless(const Model::Impl& model, size_t method, const std::vector<at::Tensor>& inputs,
                                      bool several, Workspace& workspace);

// The rows of contiguous tensors, one after another. `cat` lacks some dtypes.
at::Tensor joined_rows(const std::vector<at::Tensor>& parts);

// ModelRunError if the code did not return what the manifest lists, or `rows` rows of each output; -1: any.
void check_outputs(const MethodInfo& method, const std::vector<at::Tensor>& outputs, int64_t rows);

}  // namespace exportkit
