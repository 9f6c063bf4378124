// The runtime as dispatcher operators: called through torch.ops, they run without the GIL.
#include <fcntl.h>
#include <torch/library.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <shared_mutex>
#include <tuple>

#include "runtime/opened_package.h"
#include "runtime/package/atomic.h"
#include "runtime/package/errors.h"
#include "runtime/package/text.h"

namespace exportkit {
namespace {

/// What Python holds numbers for. A call keeps what it uses alive, so that closing a session lets calls finish.
template <class T>
class Handles {
 public:
  int64_t add(std::shared_ptr<T> value) {
    const std::unique_lock lock(mutex_);
    values_.emplace(++last_, std::move(value));
    return last_;
  }

  std::shared_ptr<T> get(int64_t handle) const {
    const std::shared_lock lock(mutex_);
    const auto found = values_.find(handle);
    TORCH_CHECK(found != values_.end(), "handle ", handle, " is of no open ", T::kName);
    return found->second;
  }

  void remove(int64_t handle) {
    std::shared_ptr<T> last;  // destroyed after the lock: unloading takes its time
    const std::unique_lock lock(mutex_);
    if (const auto found = values_.find(handle); found != values_.end()) {
      last = std::move(found->second);
      values_.erase(found);
    }
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> values_;
  int64_t last_ = 0;
};

/// A target that runs, and what its code works on, which goes after it.
struct Running {
  static constexpr const char* kName = "model";
  std::optional<CacheEntry> files;
  std::optional<MappedWeights> weights;
  std::shared_ptr<const Session> session;
};

/// A package that is being loaded.
struct Opening {
  static constexpr const char* kName = "package";
  std::vector<std::string> warnings;  // that Python was not told of
  std::optional<OpenedPackage> package;
  std::optional<UnpackedLibrary> left;  // to Python, and in use until it has looked at it
};

// Never destroyed: when the process ends, torch's own statics may be gone before ours.
Handles<Running>& sessions() {
  static auto& all = *new Handles<Running>;
  return all;
}

Handles<Opening>& packages() {
  static auto& all = *new Handles<Opening>;
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
  const auto running = std::make_shared<Running>();
  running->session = std::make_shared<const Session>(library, device, runners, std::move(constants));
  return sessions().add(running);
}

std::vector<at::Tensor> run(int64_t handle, const std::vector<at::Tensor>& inputs) {
  const Work work;
  return sessions().get(handle)->session->run(inputs);
}

void close(int64_t handle) {
  const Work work;
  sessions().remove(handle);
}

// --- opening ---------------------------------------------------------------------------------------------------------

/// What an operator of these tells Python beside its result: warnings; and the class, message and hint of an error of
/// exportkit/errors.py, or nothing.
using Said = std::vector<std::string>;

// Python's strings are Unicode, and a file's name may be no UTF-8.
std::string to_python(const std::string& text) {
  if (is_utf8(text)) return text;
  std::string shown = text;
  for (char& c : shown) c = static_cast<unsigned char>(c) < 0x80 ? c : '?';
  return shown;
}

template <class F>
Said error_of(const F& work) {
  try {
    work();
    return {};
  } catch (const Error& error) {
    return {error.name(), to_python(error.message()), to_python(error.hint())};
  } catch (const std::system_error& error) {
    return {"OSError", to_python(reason_of(error)), ""};
  }
}

Said warnings_of(Opening& opening) {
  Said warnings;
  for (const std::string& warning : std::exchange(opening.warnings, {})) warnings.push_back(to_python(warning));
  return warnings;
}

/// (package, a file descriptor of it that is Python's to close, its manifest's sha256, target, device, error)
std::tuple<int64_t, int64_t, std::string, std::string, std::string, Said> open_package(
    const std::string& path, const std::string& device, const std::optional<std::string>& target_name, int64_t runners,
    const std::vector<std::string>& public_keys, const std::string& signature, bool again) {
  const Work work;
  int64_t handle = 0, file = -1;
  std::string manifest_sha256, target, where;
  const Said error = error_of([&] {
    const auto opening = std::make_shared<Opening>();
    const auto warn = [into = opening.get()](const std::string& warning) { into->warnings.push_back(warning); };
    const Verify verify = again ? Verify::kAlways : Verify::kOnce;
    opening->package.emplace(path, OpenOptions{device, target_name, runners, public_keys, signature, verify, warn});
    const OpenedPackage& package = *opening->package;
    manifest_sha256 = package.reader().manifest_sha256();
    target = package.target().name;
    where = package.device().str();
    file = fcntl(package.reader().fd(), F_DUPFD_CLOEXEC, 0);
    if (file < 0) throw FileError(path);
    handle = packages().add(opening);
  });
  return {handle, file, manifest_sha256, target, where, error};
}

/// (sha256, path and namespaces of each library that is loaded by now, whatever went wrong; sha256 and path of one that
/// Python has to look at, after which this is to be called again; warnings; error)
std::tuple<Said, Said, Said, Said> load_operators_of(int64_t handle, const std::vector<std::string>& torch_namespaces) {
  const Work work;
  const auto opening = packages().get(handle);
  Said loaded, left;
  const Said error = error_of([&] {
    opening->left = opening->package->load_operators(std::set(torch_namespaces.begin(), torch_namespaces.end()));
    if (opening->left) left = {opening->left->sha256, opening->left->path.string()};
  });
  for (const LoadedLibrary& library : loaded_libraries()) {
    std::string namespaces;
    for (const std::string& each : library.namespaces) namespaces += (namespaces.empty() ? "" : " ") + each;
    loaded.insert(loaded.end(), {library.sha256, to_python(library.path.string()), namespaces});
  }
  return {loaded, left, warnings_of(*opening), error};
}

/// (session, warnings, error)
std::tuple<int64_t, Said, Said> load_target_of(int64_t handle) {
  const Work work;
  const auto opening = packages().get(handle);
  int64_t session = 0;
  const Said error = error_of([&] {
    const OpenedPackage& package = *opening->package;
    const auto running = std::make_shared<Running>();
    running->files.emplace(package.unpack_target());
    running->weights.emplace(package.reader());
    running->session = package.load_target(*running->files, running->weights->tensors());
    session = sessions().add(running);
  });
  return {session, warnings_of(*opening), error};
}

void close_package(int64_t handle) {
  const Work work;
  packages().remove(handle);
}

void know_loaded_library(const std::string& sha256, const std::string& path,
                         const std::vector<std::string>& namespaces) {
  const Work work;
  know_library({sha256, path, {namespaces.begin(), namespaces.end()}});
}

}  // namespace

// For every dispatch key alike, so that autograd adds nothing of its own around a call.
TORCH_LIBRARY(exportkit, m) {
  m.def("open_target(str library, Device device, int runners, str[] names, Tensor[] constants) -> int", open_target);
  m.def("run(int handle, Tensor[] inputs) -> Tensor[]", run);
  m.def("close(int handle) -> ()", close);
  m.def(
      "open_package(str path, str device, str? target, int runners, str[] public_keys, str signature, bool again) -> "
      "(int package, int file, str manifest_sha256, str target, str device, str[] error)",
      open_package);
  m.def(
      "load_operators(int package, str[] torch_namespaces) -> "
      "(str[] loaded, str[] left, str[] warnings, str[] error)",
      load_operators_of);
  m.def("load_target(int package) -> (int handle, str[] warnings, str[] error)", load_target_of);
  m.def("close_package(int package) -> ()", close_package);
  m.def("know_library(str sha256, str path, str[] namespaces) -> ()", know_loaded_library);
  m.def("before_fork() -> ()", before_fork);
  m.def("after_fork(bool child) -> ()", after_fork);
}

}  // namespace exportkit
