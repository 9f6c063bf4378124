// The runtime as dispatcher operators: called through torch.ops, they run without the GIL.
#include <torch/library.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "runtime/session.h"

namespace exportkit {
namespace {

/// What Python holds numbers for. A call keeps its session alive, so that closing one lets calls finish.
class Sessions {
 public:
  int64_t add(std::shared_ptr<const Session> session) {
    const std::unique_lock lock(mutex_);
    sessions_.emplace(++last_, std::move(session));
    return last_;
  }

  std::shared_ptr<const Session> get(int64_t handle) const {
    const std::shared_lock lock(mutex_);
    const auto found = sessions_.find(handle);
    TORCH_CHECK(found != sessions_.end(), "handle ", handle, " is of no open model");
    return found->second;
  }

  void remove(int64_t handle) {
    std::shared_ptr<const Session> last;  // destroyed after the lock: unloading takes its time
    const std::unique_lock lock(mutex_);
    if (const auto found = sessions_.find(handle); found != sessions_.end()) {
      last = std::move(found->second);
      sessions_.erase(found);
    }
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Session>> sessions_;
  int64_t last_ = 0;
};

Sessions& sessions() {
  // Never destroyed: when the process ends, torch's own statics may be gone before ours.
  static auto& all = *new Sessions;
  return all;
}

/// What a fork waits for, and what waits for a fork. A fork has one thread, the one that forked: what another one was
/// in the middle of never ends there, and who waits for it, as for a runner to be free, waits forever.
struct ForkGate {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t working = 0;  // threads
  bool forking = false;
};

ForkGate& gate() {
  static auto& only = *new ForkGate;  // never destroyed, as above
  return only;
}

// Of this thread's work. A model's operator may call a model; and between both ends of its fork, Python may close one.
thread_local int64_t depth = 0;

class Work {
 public:
  Work() {
    if (depth++ > 0) return;
    std::unique_lock lock(gate().mutex);
    gate().changed.wait(lock, [] { return !gate().forking; });
    ++gate().working;
  }
  ~Work() {
    if (--depth > 0) return;
    const std::unique_lock lock(gate().mutex);
    --gate().working;
    if (gate().forking) gate().changed.notify_all();
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
};

// Called through the dispatcher, it does not hold the GIL, which calls that are under way may need.
void before_fork() {
  std::unique_lock lock(gate().mutex);
  gate().changed.wait(lock, [] { return !gate().forking; });
  gate().forking = true;
  gate().changed.wait(lock, [] { return gate().working == (depth > 0 ? 1 : 0); });
  ++depth;
}

void after_fork(bool child) {
  --depth;
  if (child) {
    new (&gate()) ForkGate;  // threads that are not here may have been waiting for it
    gate().working = depth > 0 ? 1 : 0;
    return;
  }
  const std::unique_lock lock(gate().mutex);
  gate().forking = false;
  gate().changed.notify_all();
}

int64_t open_target(const std::string& library, c10::Device device, int64_t runners,
                    const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  const Work work;
  TORCH_CHECK(names.size() == tensors.size(), names.size(), " names for ", tensors.size(), " constants");
  Constants constants;
  for (size_t i = 0; i < names.size(); ++i) constants.emplace(names[i], tensors[i]);
  return sessions().add(std::make_shared<const Session>(library, device, runners, std::move(constants)));
}

std::vector<at::Tensor> run(int64_t handle, const std::vector<at::Tensor>& inputs) {
  const Work work;
  return sessions().get(handle)->run(inputs);
}

void close(int64_t handle) {
  const Work work;
  sessions().remove(handle);
}

}  // namespace

// For every dispatch key alike, so that autograd adds nothing of its own around a call.
TORCH_LIBRARY(exportkit, m) {
  m.def("open_target(str library, Device device, int runners, str[] names, Tensor[] constants) -> int", open_target);
  m.def("run(int handle, Tensor[] inputs) -> Tensor[]", run);
  m.def("close(int handle) -> ()", close);
  m.def("before_fork() -> ()", before_fork);
  m.def("after_fork(bool child) -> ()", after_fork);
}

}  // namespace exportkit
