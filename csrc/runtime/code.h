// The compiled code of one method of a target with its weights. Any number of threads may use it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
#include <string>
#include <unordered_map>
#include <vector>

#include "exportkit/runtime.h"
#include "runtime/graphs.h"

namespace torch::inductor {
class AOTIModelContainerRunner;
}

namespace exportkit {

// Tensors by AOTInductor's names (the original FQNs): a target's `constants` in the manifest.
using Constants = std::map<std::string, at::Tensor>;

struct CodeOptions {
  c10::Device device;
  // The calls that run at the same time; others wait. With graphs, the launches of one call follow those of another.
  int64_t runners = 1;
  CudaGraphs cuda_graphs = CudaGraphs::kNone;
  std::vector<int64_t> written;  // the inputs that the code writes in place, by index
  int64_t threads = 0;           // of a call on the CPU; 0: as many as torch takes
};

// Begins the message of the error of a call that met such a value. exportkit/package/compiled_with.py has it, too.
inline constexpr char kRefusedValue[] = "refused value: ";

// The memory in which a code's calls write what they refused. A call on a CPU has its own. On a GPU, where nobody waits
// for a call, the calls of one stream share it, or those of one session: it lies in pinned memory, so that looking at
// it costs no copy. Any number of threads may use an object.
class RefusedValues {
 public:
  // `library` is the code's, which torch has loaded.
  RefusedValues(const std::filesystem::path& library, c10::Device device);

  // Whether the code takes such memory, as its last argument.
  bool expected() const { return arguments_.has_value(); }
  // The number of its arguments before that.
  size_t arguments() const { return arguments_.value(); }

  // Memory for a call on a CPU, or for a session on a GPU. Nobody else has it until `give_back`.
  at::Tensor take() const;
  void give_back(at::Tensor memory) const;
  // The memory of the current stream of a GPU.
  at::Tensor of_stream() const;
  // Throws c10::Error if a call has refused a value, and forgets it.
  void look(const at::Tensor& memory) const;

 private:
  struct Place {
    std::string kind, operators;
  };
  std::string message(const int64_t* memory) const;

  const c10::Device device_;
  std::optional<size_t> arguments_;
  std::vector<Place> places_;
  mutable std::mutex mutex_;  // guards what follows
  mutable std::vector<at::Tensor> free_;
  mutable std::map<int64_t, at::Tensor> streams_;
};

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

class Code {
 public:
  // Loads and runs a target's library, which must have been checked. torch finds the calls of custom operators in a
  // .json beside it, and CUDA kernels in files beside it. `constants` are all tensors that the code takes from outside,
  // on the code's device with the manifest's strides; empty if the weights are inside. The code uses these tensors
  // without copying them: several methods may share them, and on the CPU they may be mapped from a file. Throws the
  // errors of torch's loader, and c10::Error if there can be no CUDA graphs here, or if the code fails to compute what
  // follows from the weights alone.
  Code(const std::filesystem::path& library, const CodeOptions& options, Constants constants = {});
  ~Code();

  c10::Device device() const { return device_; }
  // Has a turn for each of the runners, for callers that prepare a call before its turn.
  std::counting_semaphore<>& turns() const { return turns_; }
  // Has memory for callers that put several requests together.
  Workspaces& workspaces() const { return workspaces_; }

  // Runs flat inputs that the package allows on the current stream of the model's device, and returns flat outputs.
  // Throws c10::Error if the code refuses a value: on a GPU, that may be one of an earlier call on this stream, or one
  // of an earlier call with the same `refused`, the session's memory for it. `last`: see Graphs::run.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs,
                              const std::optional<at::Tensor>& refused = std::nullopt,
                              std::vector<at::Tensor>* last = nullptr) const;
  // Memory for the refused values of a session's calls; none if the code refuses none, or on a CPU.
  std::optional<at::Tensor> session_memory() const;
  // Throws c10::Error if a call that has ended refused a value: a session's, or one on the current stream.
  void look(const std::optional<at::Tensor>& refused = std::nullopt) const;

  // Graphs::capture.
  std::vector<at::Tensor> capture(std::vector<at::Tensor> arguments, size_t own) const;
  // Makes the graphs that `capture` made for `other`, which runs the same model with other weights.
  void capture_as(const Code& other) const;
  // Graphs::report.
  std::string graph_report() const;

 private:
  // The compiled code's views of the constants, which do not own memory. They outlive the code.
  struct Lent {
    std::vector<at::Tensor> tensors;
    ~Lent();
  };

  void open() const;
  // Takes the code's constants by AOTInductor's internal names.
  void set_constants(const std::unordered_map<std::string, std::string>& constants) const;
  void compute_constants() const;
  template <class Run>
  auto prepared(const Run& run) const;
  std::vector<at::Tensor> answered(const std::vector<at::Tensor>& arguments, std::vector<at::Tensor>* last) const;
  std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> first_call(const std::vector<at::Tensor>& inputs) const;
  Graphs& graphs() const;

  std::filesystem::path library_;
  c10::Device device_;
  bool with_graphs_;
  int64_t threads_;
  size_t runners_;
  bool in_turns_;  // one call launches at a time, and need not wait until the last one's kernels have ended
  mutable std::counting_semaphore<> turns_;
  mutable Workspaces workspaces_;
  Constants constants_;
  mutable std::optional<Lent> lent_;
  mutable std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner_;  // null after a first call that failed
  mutable std::mutex turn_;
  mutable std::atomic<bool> called_ = false;  // with success
  std::unique_ptr<RefusedValues> refused_;
  std::unique_ptr<Graphs> graphs_;  // null without CUDA graphs
};

// The code for new calls, one for each method of the manifest. All can be replaced at once at any time; a running call
// keeps the code that it began with.
class CurrentCode {
 public:
  using Methods = std::vector<std::shared_ptr<const Code>>;

  explicit CurrentCode(Methods methods) : methods_(std::move(methods)) {}

  std::shared_ptr<const Code> get(size_t method) const {
    const std::lock_guard lock(reading_);
    return methods_.at(method);
  }
  // Replaces the code by the result of `make`, one replacement at a time. If `make` throws, the old code stays.
  template <class Make>
  void replace(const Make& make) {
    const std::lock_guard one_at_a_time(replacing_);
    Methods methods = make();
    const std::lock_guard lock(reading_);
    methods_.swap(methods);  // the old code ends with its last call, or here
  }

 private:
  std::mutex replacing_;
  mutable std::mutex reading_;
  Methods methods_;
};

}  // namespace exportkit
