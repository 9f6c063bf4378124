// csrc/runtime/graphs.cpp over a recorder without a GPU, as a class of torch. The model is y = 2 x + 1 + h + b and
// n = ids + 1 + c, and then h += x[0] and c += the rows; b is only read.
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "runtime/graphs.h"

namespace {

using exportkit::Graphs;
using exportkit::Recorder;
using exportkit::Recording;
using exportkit::Span;
using Tensors = Graphs::Tensors;

constexpr size_t kX = 0, kIds = 1, kH = 2, kC = 3, kB = 4;  // the arguments

// What goes wrong, and how often which function was called.
struct State {
  std::string fault;
  int64_t calls = 0, launches = 0, recordings = 0;
  bool in_use = false;
};

void check(bool expected, const char* what) {
  if (!expected) throw std::logic_error(what);
}

Tensors step(const Tensors& arguments) {
  const at::Tensor y = arguments[kX].mul(2).add(1).add(arguments[kH]).add(arguments[kB]);
  const at::Tensor n = arguments[kIds].add(1).add(arguments[kC]);
  const int64_t rows = arguments[kX].size(0);
  if (rows > 0) arguments[kH].add_(arguments[kX][0]);
  if (arguments[kIds].eq(99).any().item<bool>()) throw std::runtime_error("99 is out of range");
  arguments[kC].add_(rows);
  return {y, n};
}

// Repeats the model's step on the memory that a launch names, or on that where it was recorded.
class Repeated final : public Recording {
 public:
  Repeated(State& state, std::vector<Span> own, std::vector<size_t> written, std::vector<bool> moved)
      : state_(state), own_(std::move(own)), written_(std::move(written)), moved_(std::move(moved)) {}
  ~Repeated() override { --state_.recordings; }

  void launch(c10::Stream, const std::vector<void*>& given, const std::vector<void*>& to) override {
    check(state_.in_use, "a launch without acquire");
    ++state_.launches;
    if (state_.fault == "fails") throw std::runtime_error("the driver fails");
    Tensors used;
    for (size_t i = 0; i < own_.size(); ++i) {
      if (!moved_[i]) std::memmove(own_[i].address, given[i], own_[i].bytes);
      const bool integer = i == kIds || i == kC;
      const int64_t count = own_[i].bytes / (integer ? sizeof(int64_t) : sizeof(float));
      const std::vector<int64_t> shape = i == kX ? std::vector<int64_t>{count / 4, 4} : std::vector<int64_t>{count};
      void* const place = moved_[i] && !overlooks(i) ? given[i] : own_[i].address;
      used.push_back(at::from_blob(place, shape, integer ? at::kLong : at::kFloat));
    }
    if (state_.fault == "forgets state") used[kC] = used[kC].clone();
    const Tensors outputs = step(used);
    if (state_.fault == "wrong") outputs[0].add_(0.5);
    for (size_t i = 0; i < (state_.fault == "forgets" ? 1 : 2); ++i) {
      std::memcpy(to[i], outputs[i].const_data_ptr(), outputs[i].nbytes());
    }
    if (state_.fault == "writes twice" && moved_[kH]) std::memcpy(own_[kH].address, given[kH], own_[kH].bytes);
    for (size_t i : written_) {
      if (!moved_[i]) std::memmove(given[i], own_[i].address, own_[i].bytes);
    }
  }
  bool moves(size_t argument) const override { return moved_[argument]; }

 private:
  bool overlooks(size_t i) const {
    return state_.fault == (i == kX || i == kIds ? "overlooked" : i == kH ? "overlooked state" : "nothing");
  }

  State& state_;
  const std::vector<Span> own_;
  const std::vector<size_t> written_;
  const std::vector<bool> moved_;
};

class RepeatingRecorder final : public Recorder {
 public:
  explicit RepeatingRecorder(State& state) : state_(state) {}
  void acquire(c10::Stream) override { check(!std::exchange(state_.in_use, true), "two uses at a time"); }
  void release(c10::Stream) override { check(std::exchange(state_.in_use, false), "a release without acquire"); }
  void wait_until_free() override { check(!state_.in_use, "a use that never ended"); }
  bool is_recorded(c10::Stream) const override { return state_.fault == "recorded by another"; }
  std::unique_ptr<Recording> record(const std::vector<Span>& arguments, const std::vector<size_t>& written,
                                    Arguments how, const Prepare& prepare, const Work& work) override {
    prepare();
    if (state_.fault == "refuses" || (state_.fault == "cannot move" && how == Arguments::kMoved)) {
      throw std::runtime_error("it refuses\nand says more");
    }
    work();
    for (size_t i : written) {  // a recorder runs nothing
      if (state_.fault != "runs") std::memset(arguments[i].address, 0, arguments[i].bytes);
    }
    ++state_.recordings;
    std::vector<bool> moved(arguments.size(), how == Arguments::kMoved);
    if (state_.fault == "one stays") moved[kH] = false;
    return std::make_unique<Repeated>(state_, arguments, written, moved);
  }
  int64_t memory() const override { return 0; }

 private:
  State& state_;
};

struct Model : torch::CustomClassHolder {
  State state;
  Graphs graphs;

  Model(std::string fault, bool on_first_use)
      : state{std::move(fault)},
        graphs(
            {c10::Device(c10::kCPU), on_first_use, {kH, kC}},
            [this](const Tensors& arguments) {
              ++state.calls;
              return step(arguments);
            },
            std::make_unique<RepeatingRecorder>(state)) {}

  Tensors run(const Tensors& arguments) { return graphs.run(arguments); }
  Tensors run_again(const Tensors& arguments, Tensors last) {
    Tensors outputs = graphs.run(arguments, &last);
    check(last.size() == outputs.size() && last[0].is_same(outputs[0]), "the last outputs are not this call's");
    return outputs;
  }
  Tensors capture(const Tensors& arguments) { return graphs.capture(arguments, 2); }
  // As a model with other weights does.
  void capture_as(const c10::intrusive_ptr<Model>& other) {
    for (const auto& [arguments, own] : other->graphs.captured()) graphs.capture(arguments, own);
  }
  std::string report() const { return graphs.report(); }
  // The calls of the code, the launches, and the graphs that there are.
  std::vector<int64_t> counted() const { return {state.calls, state.launches, state.recordings}; }
  void set_fault(std::string fault) { state.fault = std::move(fault); }
};

}  // namespace

TORCH_LIBRARY(graphs_on_cpu, m) {
  m.class_<Model>("Model")
      .def(torch::init<std::string, bool>())
      .def("run", &Model::run)
      .def("run_again", &Model::run_again)
      .def("capture", &Model::capture)
      .def("capture_as", &Model::capture_as)
      .def("report", &Model::report)
      .def("counted", &Model::counted)
      .def("set_fault", &Model::set_fault);
}
