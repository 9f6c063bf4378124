// csrc/runtime/graphs.cpp over a recorder without a GPU, as operators. The model is y = 2 x + 1 and n = ids + 1. With
// state it is y = 2 x + 1 + h + b and n = ids + 1 + c, and then h += x[0] and c += the rows; b is only read. The
// recorder knows that, and repeats it on the memory that a launch names.
#include <ATen/Tensor.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <stdexcept>

#include "runtime/graphs.h"

namespace {

using exportkit::Graphs;
using exportkit::Recorder;
using exportkit::Recording;
using exportkit::Span;

constexpr size_t kX = 0, kIds = 1, kH = 2, kC = 3, kB = 4;  // the arguments

// What goes wrong, and how often which function was called.
struct State {
  std::string fault;
  int64_t calls = 0, launches = 0, recordings = 0, using_memory = 0;
};

void check(bool expected, const char* what) {
  if (!expected) throw std::logic_error(what);
}

class Repeated final : public Recording {
 public:
  Repeated(State& state, std::vector<Span> arguments, std::vector<size_t> written, std::vector<Span> outputs,
           std::vector<bool> moved)
      : state_(state),
        arguments_(std::move(arguments)),
        outputs_(std::move(outputs)),
        written_(std::move(written)),
        moved_(std::move(moved)) {}
  ~Repeated() override { --state_.recordings; }

  void launch(c10::Stream, const std::vector<void*>& given, const std::vector<void*>& to) override {
    check(state_.using_memory == 1, "a launch without acquire");
    ++state_.launches;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!moved_[i]) std::memmove(arguments_[i].address, given[i], arguments_[i].bytes);
    }
    if (state_.fault == "fails") throw std::runtime_error("the driver fails");
    repeat(given, to);
    for (size_t i : written_) {
      if (!moved_[i]) std::memmove(given[i], arguments_[i].address, arguments_[i].bytes);
    }
  }
  bool moves(size_t argument) const override { return moved_[argument]; }

 private:
  template <class Number>
  Number* at(const std::vector<void*>& given, size_t i, const char* overlooked = "no fault") const {
    return static_cast<Number*>(moved_[i] && state_.fault != overlooked ? given[i] : arguments_[i].address);
  }

  void repeat(const std::vector<void*>& given, const std::vector<void*>& to) {
    const auto* x = at<const float>(given, kX, "overlooked");
    const auto* ids = at<const int64_t>(given, kIds, "overlooked");
    const size_t floats = outputs_[0].bytes / sizeof(float), numbers = outputs_[1].bytes / sizeof(int64_t);
    const bool with_state = arguments_.size() > kH;
    const float* h = with_state ? at<const float>(given, kH, "overlooked state") : nullptr;
    const float* b = with_state ? at<const float>(given, kB) : nullptr;
    const int64_t c = with_state ? *at<const int64_t>(given, kC) : 0;
    const float one = state_.fault == "wrong" ? 1.5f : 1.0f;
    auto* y = static_cast<float*>(to[0]);
    for (size_t i = 0; i < floats; ++i) {
      y[i] = 2 * x[i] + one;
      if (with_state) y[i] = y[i] + h[i % 4] + b[i % 4];
    }
    for (size_t i = 0; i < numbers && state_.fault != "forgets"; ++i) static_cast<int64_t*>(to[1])[i] = ids[i] + 1 + c;
    if (!with_state) return;
    float* new_h = at<float>(given, kH, "overlooked write");
    for (size_t i = 0; i < 4 && numbers > 0; ++i) new_h[i] = h[i] + x[i];
    if (state_.fault == "writes twice" && moved_[kH]) std::memcpy(arguments_[kH].address, new_h, 16);
    if (state_.fault != "forgets state") *at<int64_t>(given, kC) += static_cast<int64_t>(numbers);
  }

  State& state_;
  const std::vector<Span> arguments_, outputs_;
  const std::vector<size_t> written_;
  const std::vector<bool> moved_;
};

class RepeatingRecorder final : public Recorder {
 public:
  explicit RepeatingRecorder(State& state) : state_(state) {}
  void acquire(c10::Stream) override { check(++state_.using_memory == 1, "two uses at a time"); }
  void release(c10::Stream) override { check(--state_.using_memory == 0, "a release without acquire"); }
  void wait_until_free() override { check(state_.using_memory == 0, "a use that never ended"); }
  bool is_recorded(c10::Stream) const override { return state_.fault == "recorded by another"; }
  std::unique_ptr<Recording> record(const std::vector<Span>& arguments, const std::vector<size_t>& written,
                                    Arguments how, const Prepare& prepare, const Work& work) override {
    prepare();
    if (state_.fault == "refuses" || (state_.fault == "cannot move" && how == Arguments::kMoved)) {
      throw std::runtime_error("it refuses\nand says more");
    }
    const std::vector<Span> outputs = work();
    for (size_t i : written) {  // a recorder runs nothing
      if (state_.fault != "runs") std::memset(arguments[i].address, 0, arguments[i].bytes);
    }
    ++state_.recordings;
    std::vector<bool> moved(arguments.size(), how == Arguments::kMoved);
    if (state_.fault == "one stays") moved[kH] = false;
    return std::make_unique<Repeated>(state_, arguments, written, outputs, moved);
  }
  int64_t memory() const override { return 1000 * state_.recordings; }

 private:
  State& state_;
};

struct Model {
  State state;
  Graphs graphs;

  Model(const std::string& fault, bool on_first_use, bool with_state)
      : state{fault},
        graphs(
            {c10::Device(c10::kCPU), on_first_use, with_state ? std::vector<size_t>{kH, kC} : std::vector<size_t>{}},
            [this](const Graphs::Tensors& arguments) { return call(arguments); },
            std::make_unique<RepeatingRecorder>(state)) {}

  Graphs::Tensors call(const Graphs::Tensors& arguments) {
    ++state.calls;
    at::Tensor y = arguments[kX].mul(2).add(1), n = arguments[kIds].add(1);
    if (arguments.size() > kH) {
      y = y.add(arguments[kH]).add(arguments[kB]);
      n = n.add(arguments[kC]);
      if (arguments[kX].size(0) > 0) arguments[kH].add_(arguments[kX][0]);
    }
    if (arguments[kIds].eq(99).any().item<bool>()) throw std::runtime_error("99 is out of range");
    if (arguments.size() > kH) arguments[kC].add_(arguments[kX].size(0));
    return {y, n};
  }
};

std::map<int64_t, std::unique_ptr<Model>> models;

int64_t open(const std::string& fault, bool on_first_use, bool with_state) {
  const int64_t handle = models.empty() ? 1 : models.rbegin()->first + 1;
  models.emplace(handle, std::make_unique<Model>(fault, on_first_use, with_state));
  return handle;
}
std::vector<at::Tensor> run(int64_t handle, const std::vector<at::Tensor>& arguments) {
  return models.at(handle)->graphs.run(arguments);
}
std::vector<at::Tensor> run_again(int64_t handle, const std::vector<at::Tensor>& arguments,
                                  std::vector<at::Tensor> last) {
  std::vector<at::Tensor> outputs = models.at(handle)->graphs.run(arguments, &last);
  check(last.size() == outputs.size() && last[0].is_same(outputs[0]), "the last outputs are not this call's");
  return outputs;
}
std::vector<at::Tensor> capture(int64_t handle, const std::vector<at::Tensor>& arguments) {
  return models.at(handle)->graphs.capture(arguments, 2);
}
// As a model with other weights does.
void capture_as(int64_t handle, int64_t other) {
  for (const auto& [arguments, own] : models.at(other)->graphs.captured()) {
    models.at(handle)->graphs.capture(arguments, own);
  }
}
std::string report(int64_t handle) { return models.at(handle)->graphs.report(); }
// The calls of the code, the launches, and the graphs that there are.
std::vector<int64_t> counted(int64_t handle) {
  const State& state = models.at(handle)->state;
  return {state.calls, state.launches, state.recordings};
}
void set_fault(int64_t handle, const std::string& fault) { models.at(handle)->state.fault = fault; }
void forget(int64_t handle) { models.erase(handle); }

}  // namespace

TORCH_LIBRARY(graphs_on_cpu, m) {
  m.def("open(str fault, bool on_first_use, bool with_state) -> int", open);
  m.def("run(int handle, Tensor[] arguments) -> Tensor[]", run);
  m.def("run_again(int handle, Tensor[] arguments, Tensor[] last) -> Tensor[]", run_again);
  m.def("capture(int handle, Tensor[] arguments) -> Tensor[]", capture);
  m.def("capture_as(int handle, int other) -> ()", capture_as);
  m.def("report(int handle) -> str", report);
  m.def("counted(int handle) -> int[]", counted);
  m.def("set_fault(int handle, str fault) -> ()", set_fault);
  m.def("forget(int handle) -> ()", forget);
}
