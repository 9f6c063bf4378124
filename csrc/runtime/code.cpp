#include "runtime/code.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <sstream>

#include "runtime/cuda_driver.h"
#include "runtime/streams.h"

namespace exportkit {
namespace {

// Makes the process's libstdc++ visible to all libraries. Otherwise torch's loader crashes in std::regex if a model's
// library contains parts of another libstdc++, which some compilers link statically.
void promote_libstdcxx() {
  static void* const promoted = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_GLOBAL);
  (void)promoted;  // null if torch was built with another standard library
}

// AOTInductor's name of a constant that the code computes from the weights, such as a weight in another order.
bool is_computed(const std::string& constant) { return constant.rfind("_FOLDED_CONST_", 0) == 0; }

// torch's own OpenMP library, which compiled code uses as well, and the MKL in torch. Null where torch has none.
struct Setters {
  void (*of_openmp)(int);
  int (*of_mkl)(int);  // returns the number before; 0 if none was set
};

const Setters& setters() {
  static const Setters found = [] {
    void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);  // its dependencies are searched, too
    if (torch == nullptr) return Setters{};
    return Setters{reinterpret_cast<void (*)(int)>(dlsym(torch, "omp_set_num_threads")),
                   reinterpret_cast<int (*)(int)>(dlsym(torch, "MKL_Set_Num_Threads_Local"))};
  }();
  return found;
}

// Until the result ends, what this thread calls has so many threads; 0: as many as before. at::set_num_threads would
// change threads that begin meanwhile, too.
auto with_threads(int64_t count) {
  int before = 0, of_mkl = 0;                                                        // 0: unchanged
  if (count != 0 && setters().of_openmp != nullptr) before = at::get_num_threads();  // which a thread's first use sets
  if (before == count) before = 0;
  if (before != 0) {
    setters().of_openmp(static_cast<int>(count));
    if (setters().of_mkl != nullptr) of_mkl = setters().of_mkl(static_cast<int>(count));
  }
  return c10::make_scope_exit([before, of_mkl] {
    if (before == 0) return;
    setters().of_openmp(before);
    if (setters().of_mkl != nullptr) setters().of_mkl(of_mkl);
  });
}

// --- refused values --------------------------------------------------------------------------------------------------

constexpr char kPlaces[] = "exportkit_refused_places";  // of exportkit/package/compiled_with.py
constexpr size_t kPlaceCount = 64;
constexpr int64_t kLength = 1 + 2 * kPlaceCount;
constexpr size_t kLate = 64;  // blocks that rest before they are used again

// Pinned memory of closed sessions and models. A kernel that still runs may write into it, so it is never freed, and it
// rests before others get it.
class Pinned {
 public:
  static Pinned& all() {
    static auto& pinned = *new Pinned;
    return pinned;
  }

  at::Tensor take() {
    {
      const std::lock_guard lock(mutex_);
      if (resting_.size() > kLate) {
        at::Tensor memory = std::move(resting_.front());
        resting_.pop_front();
        memory.zero_();
        return memory;
      }
    }
    return at::zeros({kLength}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  }
  void rest(at::Tensor memory) {
    const std::lock_guard lock(mutex_);
    resting_.push_back(std::move(memory));
  }

 private:
  std::mutex mutex_;
  std::deque<at::Tensor> resting_;
};

// A GPU reads and writes pinned memory at the address that the host has for it.
at::Tensor seen_by(c10::Device device, const at::Tensor& pinned) {
  return at::for_blob(pinned.mutable_data_ptr(), pinned.sizes())
      .options(pinned.options().device(device).pinned_memory(false))
      .target_device(device)
      .deleter([pinned](void*) { Pinned::all().rest(pinned); })
      .make_tensor();
}

}  // namespace

template <class Run>
auto Code::prepared(const Run& run) const {
  // The compiled code keeps no graph. Without this, operators' autograd kernels would run; if they are in Python, they
  // would wait for the GIL.
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // torch uses the current device's stream, even if the model is on another device.
  const c10::DeviceGuard guard(device_);
  if (device_.is_cuda()) ensure_cuda_context(device_.index());
  const auto threads = with_threads(threads_);
  return run();
}

Code::Code(const std::filesystem::path& library, const CodeOptions& options, Constants constants)
    : library_(library),
      device_(options.device),
      with_graphs_(options.cuda_graphs != CudaGraphs::kNone),
      threads_(options.threads),
      runners_(with_graphs_ ? 1 : static_cast<size_t>(options.runners)),
      // Otherwise torch records an event in each call, and a runner's next call waits for it on the host. Code that
      // does cannot be captured, either (pytorch#148601).
      in_turns_(device_.is_cuda() && runners_ == 1),
      turns_(options.runners),
      constants_(std::move(constants)) {
  TORCH_CHECK(!with_graphs_ || device_.is_cuda(), "a model on ", device_, " has no CUDA graphs");
  const char* const reason = with_graphs_ ? why_no_cuda_recorder() : nullptr;
  TORCH_CHECK(reason == nullptr, "there are no CUDA graphs here: ", reason);
  promote_libstdcxx();
  open();
  refused_ = std::make_unique<RefusedValues>(library_, device_);
  if (with_graphs_) {
    std::vector<size_t> written(options.written.begin(), options.written.end());
    const bool overlaps_matter = !written.empty();
    if (refused_->expected()) written.push_back(refused_->arguments());
    graphs_ = std::make_unique<Graphs>(
        Graphs::Options{device_, options.cuda_graphs == CudaGraphs::kOnFirstUse, std::move(written), overlaps_matter},
        [this](const Graphs::Tensors& inputs) { return call(inputs); }, cuda_recorder(device_));
  }
}

void Code::open() const {
  runner_.reset();
  lent_.emplace();
  // torch registers a runner for each device that it supports, so one build of this library works with and without
  // CUDA.
  const auto& known = torch::inductor::getAOTIModelRunnerRegistry();
  const std::string kind = c10::DeviceTypeName(device_.type(), /*lower_case=*/true);
  const auto create = known.find(kind);
  TORCH_CHECK(create != known.end(), "this build of torch cannot run code for ", kind);
  const std::string kernels = device_.is_cpu() ? "" : library_.parent_path().string();
  runner_ = create->second(library_.string(), runners_, device_.str(), kernels, /*single_threaded=*/in_turns_);
  const auto names = runner_->getConstantNamesToOriginalFQNs();
  if (!constants_.empty()) set_constants(names);
  // Other code would print a warning.
  if (std::any_of(names.begin(), names.end(), [](const auto& name) { return is_computed(name.second); })) {
    compute_constants();
  }
}

Code::~Code() = default;

Code::Lent::~Lent() {
  if (tensors.empty()) return;
  // The last calls' kernels may still read them, on any stream. torch gives their memory to the next that asks.
  wait_for_device(tensors.front().device());
  // The compiled code never releases its references to these (MaybeOwningAtenTensorHandle in torch 2.11 and 2.13).
  for (const at::Tensor& tensor : tensors) {
    if (tensor.use_count() > 1) c10::raw::intrusive_ptr::decref(tensor.unsafeGetTensorImpl());
  }
}

void Code::set_constants(const std::unordered_map<std::string, std::string>& constants) const {
  std::map<std::string, std::string> names;  // from the constant's name to AOTInductor's internal name
  for (const auto& [name, constant] : constants) {
    if (is_computed(constant)) continue;
    TORCH_CHECK(names.emplace(constant, name).second, "the code has several constants of the name ", constant,
                ", of which one would stay unset: export it again");
    TORCH_CHECK(constants_.count(constant), "the manifest does not say which weight the code takes for ", constant);
  }
  for (const auto& [constant, tensor] : constants_) {
    TORCH_CHECK(names.count(constant), "the code has no constant ", constant, ", which the manifest lists");
  }
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& [constant, tensor] : constants_) {
    TORCH_CHECK(tensor.device() == device_, constant, " is on ", tensor.device(), ", and the code runs on ", device_);
    lent_->tensors.push_back(at::for_blob(tensor.data_ptr(), tensor.sizes())
                                 .strides(tensor.strides())
                                 .options(tensor.options())
                                 .target_device(tensor.device())
                                 .make_tensor());
    by_name.emplace(names.at(constant), lent_->tensors.back());
  }
  runner_->update_constant_buffer(by_name, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                  /*user_managed=*/true);
}

// Otherwise the first call does this. With torch 2.11 two first calls at once then wait for each other forever; and if
// the first fails in it, as without memory, every torch loses the runner: the next call waits for it forever.
void Code::compute_constants() const {
  try {
    prepared([&] { runner_->run_const_fold(/*use_inactive=*/false); });
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "the code failed where it computes with its weights alone: ", error.what());
  }
  wait_for_device(device_);  // calls on any stream read them
}

std::vector<at::Tensor> Code::run(const std::vector<at::Tensor>& inputs, const std::optional<at::Tensor>& refused,
                                  std::vector<at::Tensor>* last) const {
  if (!refused_->expected()) return answered(inputs, last);
  std::vector<at::Tensor> arguments;
  arguments.reserve(inputs.size() + 1);
  arguments = inputs;
  const bool on_cpu = device_.is_cpu();
  const at::Tensor memory = on_cpu ? refused_->take() : refused ? *refused : refused_->of_stream();
  const auto end = c10::make_scope_exit([&] { refused_->give_back(memory); });
  arguments.push_back(memory);
  refused_->look(memory);
  try {
    auto outputs = answered(arguments, last);
    if (on_cpu) refused_->look(memory);
    return outputs;
  } catch (const std::exception&) {
    // What ran before it failed may refuse a value, which says more, and not in the next call.
    wait_for_device(device_);
    refused_->look(memory);
    throw;
  }
}

std::optional<at::Tensor> Code::session_memory() const {
  if (device_.is_cpu() || !refused_->expected()) return std::nullopt;
  return refused_->take();
}

void Code::look(const std::optional<at::Tensor>& refused) const {
  if (!device_.is_cpu() && refused_->expected()) refused_->look(refused ? *refused : refused_->of_stream());
}

std::vector<at::Tensor> Code::answered(const std::vector<at::Tensor>& arguments, std::vector<at::Tensor>* last) const {
  if (!graphs_) return call(arguments);
  const c10::DeviceGuard guard(device_);
  ensure_cuda_context(device_.index());
  return graphs_->run(arguments, last);
}

Graphs& Code::graphs() const {
  TORCH_CHECK(graphs_, "the model was loaded without CUDA graphs");
  return *graphs_;
}

std::vector<at::Tensor> Code::capture(std::vector<at::Tensor> arguments, size_t own) const {
  Graphs& graphs = this->graphs();
  TORCH_CHECK(own <= arguments.size(), own, " of ", arguments.size(), " arguments cannot be the graph's own");
  const c10::DeviceGuard guard(device_);
  ensure_cuda_context(device_.index());
  if (refused_->expected() && arguments.size() == refused_->arguments()) arguments.push_back(refused_->of_stream());
  return graphs.capture(arguments, own);
}

void Code::capture_as(const Code& other) const {
  for (const auto& [arguments, own] : other.graphs().captured()) capture(arguments, own);
}

std::string Code::graph_report() const { return graphs().report(); }

std::vector<at::Tensor> Code::call(const std::vector<at::Tensor>& inputs) const {
  const auto run = [&] { return prepared([&] { return runner_->run(inputs); }); };
  if (in_turns_) {
    const std::lock_guard turn(turn_);
    return run();
  }
  if (device_.is_cuda() && !called_) {
    const std::lock_guard turn(turn_);
    if (!called_) return first_call(inputs);
  }
  return run();
}

// With several runners, the first call on a GPU records an event even without constants to compute. A broken device
// refuses that. Then torch before 2.15 loses the runner, and the next call would wait for it forever. So the next call
// opens the code anew.
std::vector<at::Tensor> Code::first_call(const std::vector<at::Tensor>& inputs) const {
  if (!runner_) open();
  try {
    auto outputs = prepared([&] { return runner_->run(inputs); });
    called_ = true;
    return outputs;
  } catch (const std::exception&) {
    runner_.reset();
    throw;
  }
}

// --- refused values --------------------------------------------------------------------------------------------------

RefusedValues::RefusedValues(const std::filesystem::path& library, c10::Device device) : device_(device) {
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (opened == nullptr) return;
  const auto places = reinterpret_cast<const char* (*)()>(dlsym(opened, kPlaces));
  if (places != nullptr) {
    std::istringstream lines(places());
    std::string line;
    std::getline(lines, line);
    arguments_ = std::stoul(line);
    while (std::getline(lines, line) && places_.size() < kPlaceCount) {
      const size_t tab = line.find('\t');
      places_.push_back({line.substr(0, tab), tab == std::string::npos ? "" : line.substr(tab + 1)});
    }
  }
  dlclose(opened);
}

at::Tensor RefusedValues::take() const {
  if (!device_.is_cpu()) return seen_by(device_, Pinned::all().take());
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      at::Tensor memory = std::move(free_.back());
      free_.pop_back();
      return memory;
    }
  }
  return at::zeros({kLength}, at::kLong);
}

void RefusedValues::give_back(at::Tensor memory) const {
  if (!device_.is_cpu()) return;  // its last reference gives it to the others
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
}

at::Tensor RefusedValues::of_stream() const {
  const int64_t stream = current_stream(device_).id();
  const std::lock_guard lock(mutex_);
  at::Tensor& memory = streams_[stream];
  if (!memory.defined()) memory = take();
  return memory;
}

void RefusedValues::look(const at::Tensor& memory) const {
  auto* const said = static_cast<int64_t*>(memory.data_ptr());
  if (__atomic_load_n(said, __ATOMIC_RELAXED) == 0) return;
  wait_for_device(device_);  // whoever wrote it may still write the rest
  const std::string message = this->message(said);
  std::memset(said, 0, kLength * sizeof(int64_t));
  TORCH_CHECK(false, kRefusedValue, message);
}

std::string RefusedValues::message(const int64_t* memory) const {
  for (size_t i = 0; i < places_.size(); ++i) {
    const int64_t size = memory[2 + 2 * i];
    if (size == 0) continue;
    const auto& [kind, operators] = places_[i];
    const std::string at = operators.empty() ? "" : operators + ": ";
    if (kind == "division") return at + "an integer is divided by zero";
    if (kind.empty()) break;  // one of many that share a place
    if (kind.rfind("index", 0) != 0) return at + kind;
    const int64_t length = (size < 0 ? -size : size) - 1;
    const bool wraps = kind != "index";  // negative ones count from the end, and had the length added
    const int64_t value = memory[1 + 2 * i], given = wraps && value < 0 ? value - length : value;
    return at + (size < 0 ? "an index" : "index " + std::to_string(given)) + " is out of range: from " +
           std::to_string(wraps ? -length : 0) + " to " + std::to_string(length - 1) + " are allowed";
  }
  return "the code refused a value";
}

}  // namespace exportkit
