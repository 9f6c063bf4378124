#include "runtime/joined_state.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <bit>
#include <cstring>

namespace exportkit {
namespace {

using Tensors = std::vector<at::Tensor>;

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

// Copies the sessions' tensors at a place into that of all, or back. What is on a GPU waits in `to` and `from`.
void copy(const at::Tensor& all, const SessionStates& sessions, size_t place, bool back, Tensors& to, Tensors& from) {
  char* data = static_cast<char*>(all.mutable_data_ptr());
  int64_t row = 0;
  for (const Tensors& session : sessions) {
    const at::Tensor& own = session[place];
    if (own.nbytes() == 0) continue;
    if (own.is_cpu()) {
      std::memcpy(back ? own.mutable_data_ptr() : data, back ? data : own.const_data_ptr(), own.nbytes());
      data += own.nbytes();
      continue;
    }
    (back ? to : from).push_back(own);
    (back ? from : to).push_back(all.narrow(0, row, own.size(0)));
    row += own.size(0);
  }
}

// A GPU gets one launch for many tensors.
void launch(const Tensors& to, const Tensors& from) {
  if (!to.empty()) at::_foreach_copy_(to, from, /*non_blocking=*/true);
}

}  // namespace

std::vector<at::Tensor> gather_state(const SessionStates& sessions, Workspace& workspace) {
  int64_t rows = 0;
  for (const Tensors& session : sessions) rows += session.front().size(0);
  make_room(workspace, sessions.front(), rows);
  Tensors all, to, from;
  for (size_t place = 0; place < workspace.state.size(); ++place) {
    all.push_back(workspace.state[place].narrow(0, 0, rows));
    copy(all.back(), sessions, place, /*back=*/false, to, from);
  }
  launch(to, from);
  return all;
}

void scatter_state(const std::vector<at::Tensor>& all, const SessionStates& sessions,
                   const std::vector<int64_t>& written) {
  Tensors to, from;
  for (const int64_t place : written) {
    copy(all[static_cast<size_t>(place)], sessions, static_cast<size_t>(place), /*back=*/true, to, from);
  }
  launch(to, from);
}

}  // namespace exportkit
