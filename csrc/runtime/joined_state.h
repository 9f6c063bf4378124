// The state of several sessions in one call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "runtime/workspaces.h"

namespace exportkit {

using SessionStates = std::vector<std::vector<at::Tensor>>;  // of each session, what a method uses

// The rows of all sessions, one after another, in memory that the workspace keeps.
std::vector<at::Tensor> gather_state(const SessionStates& sessions, Workspace& workspace);

// Copies what the call wrote, the tensors at these places, back to the sessions.
void scatter_state(const std::vector<at::Tensor>& all, const SessionStates& sessions,
                   const std::vector<int64_t>& written);

}  // namespace exportkit
