// Memory that calls of one method use again.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace exportkit {

// What one call uses at a time.
struct Workspace {
  std::vector<at::Tensor> inputs;  // for each input, bytes on the CPU in which pieces are put together
  std::vector<at::Tensor> state;   // the state of several sessions, with room for `rows` rows
  int64_t rows = 0;
  std::vector<at::Tensor> outputs;    // of the last call, which its caller has seen: Graphs::run
  std::optional<at::Tensor> refused;  // what a call with that state refused: Code::session_memory
  std::unique_ptr<Workspace> next;    // of those that are free
};

// Any number of threads may use it. The one that was used last is taken first: its memory is the warmest.
class Workspaces {
 public:
  std::unique_ptr<Workspace> take() {
    const std::lock_guard lock(mutex_);
    if (free_ == nullptr) return std::make_unique<Workspace>();
    std::unique_ptr<Workspace> taken = std::move(free_);
    free_ = std::move(taken->next);
    return taken;
  }
  void give_back(std::unique_ptr<Workspace> workspace) noexcept {
    const std::lock_guard lock(mutex_);
    workspace->next = std::move(free_);
    free_ = std::move(workspace);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<Workspace> free_;
};

}  // namespace exportkit
