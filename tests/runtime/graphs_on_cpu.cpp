// csrc/runtime/graphs.cpp over a recorder without a GPU, as operators. The model is y = 2 x + 1 and n = ids + 1; the
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
  Repeated(State& state, std::vector<Span> inputs, std::vector<Span> outputs, Recorder::Inputs how)
      : state_(state), inputs_(std::move(inputs)), outputs_(std::move(outputs)), how_(how) {}
  ~Repeated() override { --state_.recordings; }

  void launch(c10::Stream, const std::vector<const void*>& from, const std::vector<void*>& to) override {
    check(state_.using_memory == 1, "a launch without acquire");
    ++state_.launches;
    const bool moved = how_ == Inputs::kMoved;
    for (size_t i = 0; i < inputs_.size() && !moved; ++i) std::memmove(inputs_[i].address, from[i], inputs_[i].bytes);
    const bool overlooked = moved && state_.fault == "overlooked";
    const auto* x = static_cast<const float*>(moved && !overlooked ? from[0] : inputs_[0].address);
    const auto* ids = static_cast<const int64_t*>(moved && !overlooked ? from[1] : inputs_[1].address);
    const size_t floats = outputs_[0].bytes / sizeof(float), numbers = outputs_[1].bytes / sizeof(int64_t);
    const float one = state_.fault == "wrong" ? 1.5f : 1.0f;
    for (size_t i = 0; i < floats; ++i) static_cast<float*>(to[0])[i] = 2 * x[i] + one;
    if (state_.fault == "forgets") return;
    for (size_t i = 0; i < numbers; ++i) static_cast<int64_t*>(to[1])[i] = ids[i] + 1;
  }

 private:
  using Inputs = Recorder::Inputs;
  State& state_;
  const std::vector<Span> inputs_, outputs_;
  const Inputs how_;
};

class RepeatingRecorder final : public Recorder {
 public:
  explicit RepeatingRecorder(State& state) : state_(state) {}
  void acquire(c10::Stream) override { check(++state_.using_memory == 1, "two uses at a time"); }
  void release(c10::Stream) override { check(--state_.using_memory == 0, "a release without acquire"); }
  void wait_until_free() override { check(state_.using_memory == 0, "a use that never ended"); }
  bool is_recorded(c10::Stream) const override { return state_.fault == "recorded by another"; }
  std::unique_ptr<Recording> record(const std::vector<Span>& inputs, Inputs how, const Prepare& prepare,
                                    const Work& work) override {
    prepare();
    if (state_.fault == "refuses" || (state_.fault == "cannot move" && how == Inputs::kMoved)) {
      throw std::runtime_error("it refuses\nand says more");
    }
    const std::vector<Span> outputs = work();
    ++state_.recordings;
    return std::make_unique<Repeated>(state_, inputs, outputs, how);
  }
  int64_t memory() const override { return 1000 * state_.recordings; }

 private:
  State& state_;
};

struct Model {
  State state;
  Graphs graphs;

  Model(const std::string& fault, bool on_first_use)
      : state{fault},
        graphs(
            c10::Device(c10::kCPU), [this](const Graphs::Tensors& inputs) { return call(inputs); },
            std::make_unique<RepeatingRecorder>(state), on_first_use) {}

  Graphs::Tensors call(const Graphs::Tensors& inputs) {
    ++state.calls;
    if (inputs[1].eq(99).any().item<bool>()) throw std::runtime_error("99 is out of range");
    return {inputs[0].mul(2).add(1), inputs[1].add(1)};
  }
};

std::map<int64_t, std::unique_ptr<Model>> models;

int64_t open(const std::string& fault, bool on_first_use) {
  const int64_t handle = models.empty() ? 1 : models.rbegin()->first + 1;
  models.emplace(handle, std::make_unique<Model>(fault, on_first_use));
  return handle;
}
std::vector<at::Tensor> run(int64_t handle, const std::vector<at::Tensor>& inputs) {
  return models.at(handle)->graphs.run(inputs);
}
std::vector<at::Tensor> capture(int64_t handle, const std::vector<at::Tensor>& inputs) {
  return models.at(handle)->graphs.capture(inputs);
}
std::string report(int64_t handle) { return models.at(handle)->graphs.report(); }
// The calls of the code, the launches, and the graphs that there are.
std::vector<int64_t> counted(int64_t handle) {
  const State& state = models.at(handle)->state;
  return {state.calls, state.launches, state.recordings};
}
void forget(int64_t handle) { models.erase(handle); }

}  // namespace

TORCH_LIBRARY(graphs_on_cpu, m) {
  m.def("open(str fault, bool on_first_use) -> int", open);
  m.def("run(int handle, Tensor[] inputs) -> Tensor[]", run);
  m.def("capture(int handle, Tensor[] inputs) -> Tensor[]", capture);
  m.def("report(int handle) -> str", report);
  m.def("counted(int handle) -> int[]", counted);
  m.def("forget(int handle) -> ()", forget);
}
