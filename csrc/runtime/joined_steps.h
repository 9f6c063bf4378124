// Runs one call for several sessions: the rows of their state are gathered, and what is written goes back.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/session_impl.h"
#include "runtime/workspaces.h"

namespace exportkit {

// Runs a method whose rows are those of `row_rule`, with the inputs of all sessions. The caller has their turns. The
// state is gathered into the workspace. Sessions change after the call has ended without an error, and its outputs have
// the rows of all: ModelRunError, RefusedValueError.
std::vector<at::Tensor> run_joined(const Model::Impl& model, size_t method, const std::vector<Session::Impl*>& sessions,
                                   const std::vector<at::Tensor>& inputs, Workspace& workspace);

// Runs a method without state, and waits. If `several`, each output has the rows of the inputs: ModelRunError,
// RefusedValueError.
std::vector<at::Tensor> run_stateless(const Model::Impl& model, size_t method, const std::vector<at::Tensor>& inputs,
                                      bool several, Workspace& workspace);

// ModelRunError if the code did not return what the manifest lists, or `rows` rows of each output; -1: any.
void check_outputs(const MethodInfo& method, const std::vector<at::Tensor>& outputs, int64_t rows);

}  // namespace exportkit
