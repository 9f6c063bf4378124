// Runs one call for several requests: gathers the rows of their sessions' state, and writes back what the call wrote.
// Finds out whether the rows of one request influence another's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
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

struct TriedRows {
  int64_t most;           // rows of a call; 0: each request runs by itself
  std::string reason;     // then, why
  bool bit_equal = true;  // answers had the same bits, however requests were put together
};

// Rows of the recorded cases are called in small requests, then together, in calls of two requests, four, and so on.
// Where the cases have fewer rows, rows of floating inputs are rolled to make others. A method with state plays its
// first recorded sequence so. Throws the errors of Model::recorded_case.
TriedRows try_rows(const Model& model, const MethodInfo& method, int64_t most);

}  // namespace exportkit
