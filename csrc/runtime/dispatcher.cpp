// Exposes sessions as dispatcher operators, which torch.ops calls without the GIL.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "package/fork_gate.h"
#include "runtime/session.h"

namespace exportkit {
namespace {

// The open sessions, to which Python refers by numbers. A call keeps its session alive, so it can finish after a close.
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
    TORCH_CHECK(found != sessions_.end(), "handle ", handle, " does not belong to an open model");
    return found->second;
  }

  void remove(int64_t handle) {
    std::shared_ptr<const Session> last;  // destroyed after the lock is released: unloading is slow
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

// Never destroyed: at exit, torch's static objects may be destroyed before ours.
Sessions& sessions() {
  static auto& all = *new Sessions;
  return all;
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

// Every namespace with an operator.
std::vector<std::string> namespaces() {
  std::set<std::string> found;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    found.insert(name.name.substr(0, name.name.find("::")));
  }
  return {found.begin(), found.end()};
}

}  // namespace

// Registered for all dispatch keys, so that autograd adds nothing to a call.
TORCH_LIBRARY(exportkit, m) {
  m.def("open_target(str library, Device device, int runners, str[] names, Tensor[] constants) -> int", open_target);
  m.def("run(int handle, Tensor[] inputs) -> Tensor[]", run);
  m.def("close(int handle) -> ()", close);
  m.def("namespaces() -> str[]", namespaces);
}

}  // namespace exportkit
