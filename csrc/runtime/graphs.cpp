#include "runtime/graphs.h"

#include <ATen/Context.h>
#include <ATen/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "package/json_text.h"
#include "package/text.h"

namespace exportkit {
namespace {

using Tensors = Graphs::Tensors;

constexpr uint64_t kAgeing = 4096;     // calls, after which all uses count half: a workload may change
constexpr uintptr_t kAlignment = 256;  // of memory that torch allocates: kernels are chosen by their inputs' alignment
constexpr int kFailures = 3;           // calls that fail, after which these sizes get no graph
constexpr uint64_t kMargin = 8;        // uses more than another's, for taking its place: a capture costs some calls

Tensors like(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    made.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
  }
  return made;
}

// The same, contiguous, with unused memory behind each: the end of one is not the beginning of another.
Tensors apart_like(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor memory = at::empty({tensor.numel() + 1}, tensor.options());
    made.push_back(memory.narrow(0, 0, tensor.numel()).view(tensor.sizes()));
  }
  return made;
}

// Memory that contains all elements of a tensor, and nothing of other tensors if it is dense.
Span span_of(const at::Tensor& tensor) {
  size_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) last += (tensor.size(axis) - 1) * tensor.stride(axis);
  return {tensor.data_ptr(), tensor.numel() == 0 ? 0 : (last + 1) * tensor.itemsize()};
}

std::vector<Span> spans_of(const Tensors& tensors) {
  std::vector<Span> spans;
  for (const at::Tensor& tensor : tensors) spans.push_back(span_of(tensor));
  return spans;
}

void set_zero(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) tensor.zero_();
}

// Numbers from 0 to 1 that differ, whatever the state of random generators; integers are 0, which is an index.
void set_example(const Tensors& tensors) {
  set_zero(tensors);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_floating_point() || tensor.numel() == 0) continue;
    const double golden = 0.6180339887498949;
    const at::Tensor steps =
        at::arange(0, golden * (tensor.numel() - 0.5), golden, tensor.options().dtype(at::kDouble));
    tensor.copy_(steps.frac_().view(tensor.sizes()));
  }
}

// The memory of new tensors may hold the right answer, of an earlier run.
void set_noise(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const Span span = span_of(tensor);
    const auto bytes = static_cast<int64_t>(span.bytes);
    if (bytes > 0) at::from_blob(span.address, bytes, tensor.options().dtype(at::kByte)).fill_(0xA5);
  }
}

// The same values, but examples for tensors that are zero: these look like memory that nobody has read.
Tensors tellable(const Tensors& inputs) {
  Tensors given = like(inputs);
  set_example(given);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].any().item<bool>()) given[i].copy_(inputs[i]);
  }
  return given;
}

// The settings that a call follows when it chooses kernels, and a graph cannot.
std::array<int, 6> settings() {
  const at::Context& context = at::globalContext();
  const auto precision = [&](at::Float32Op op) {
    return static_cast<int>(context.float32Precision(at::Float32Backend::CUDA, op));
  };
  return {precision(at::Float32Op::MATMUL),
          precision(at::Float32Op::CONV),
          precision(at::Float32Op::RNN),
          static_cast<int>(context.allowFP16ReductionCuBLAS()),
          static_cast<int>(context.allowBF16ReductionCuBLAS()),
          static_cast<int>(context.deterministicAlgorithms())};
}

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) return false;
  const auto bytes = [](const at::Tensor& tensor) { return tensor.contiguous().reshape(-1).view(at::kByte); };
  return at::equal(bytes(one), bytes(other));
}

}  // namespace

struct Graphs::Graph {
  Recorder::Inputs how;
  Tensors inputs;  // the graph's own; none if it reads inputs where they are, and nobody asked for its own
  Tensors outputs;
  std::unique_ptr<Recording> recording;
};

struct Graphs::Known {
  uint64_t uses = 0;
  int failures = 0;   // of calls, before there was a graph
  bool kept = false;  // it was asked for, and is never the one that makes room
  std::string refusal;
  std::unique_ptr<Graph> graph;
};

Graphs::Graphs(c10::Device device, Call call, std::unique_ptr<Recorder> recorder, bool on_first_use)
    : device_(device), call_(std::move(call)), recorder_(std::move(recorder)), on_first_use_(on_first_use) {}

Graphs::~Graphs() {
  try {
    recorder_->wait_until_free();
  } catch (...) {  // a broken device
  }
}

Tensors Graphs::run(const Tensors& inputs) {
  const c10::Stream stream = current_stream();
  const std::lock_guard lock(mutex_);
  if (recorder_->is_recorded(stream)) return call_(inputs);  // becomes part of the caller's own graph
  Known* const known = this->known(inputs);
  if (known == nullptr) return call_(inputs);
  count(*known);
  if (!known->graph && on_first_use_ && known->refusal.empty() && make_room(*known)) make_graph(*known, inputs);
  if (!known->graph) return call_(inputs);
  Tensors outputs = like(known->graph->outputs);
  launch(*known->graph, inputs, outputs, stream);
  return outputs;
}

Tensors Graphs::capture(const Tensors& inputs) {
  const Tensors examples = like(inputs);
  set_example(examples);
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!recorder_->is_recorded(current_stream()), "another graph is being captured on the current stream");
  Known* const known = this->known(inputs);
  if (known != nullptr && !known->graph) {
    known->refusal.clear();
    known->kept = true;
    if (make_room(*known)) make_graph(*known, examples);
  }
  const bool full = known == nullptr || (!known->graph && known->refusal.empty());
  TORCH_CHECK(!full, "a model has at most ", kMost, " graphs, and all of them were asked for");
  TORCH_CHECK(known->graph, known->refusal);
  known->kept = true;
  if (known->graph->inputs.empty()) known->graph->inputs = examples;
  return known->graph->inputs;
}

std::vector<Tensors> Graphs::kept() const {
  const std::lock_guard lock(mutex_);
  std::vector<Tensors> inputs;
  for (const auto& [signature, known] : known_) {
    if (known.graph && known.kept) inputs.push_back(known.graph->inputs);
  }
  return inputs;
}

std::string Graphs::report() const {
  const std::lock_guard lock(mutex_);
  std::string graphs, refused;
  for (const auto& [signature, known] : known_) {
    const std::string shapes = json_list(signature.sizes, [](const auto& shape) {
      return json_list(shape, [](int64_t size) { return std::to_string(size); });
    });
    std::string& list = known.graph ? graphs : refused;
    if (!known.graph && known.refusal.empty()) continue;
    list += (list.empty() ? "" : ",") + ("{\"shapes\":" + shapes);
    if (known.graph) {
      const bool moved = known.graph->how == Recorder::Inputs::kMoved;
      list += ",\"uses\":" + std::to_string(known.uses) + ",\"copies_inputs\":" + (moved ? "false}" : "true}");
    } else {
      list += ",\"reason\":" + json_text(known.refusal) + "}";
    }
  }
  return "{\"memory\":" + std::to_string(recorder_->memory()) + ",\"graphs\":[" + graphs + "],\"refused\":[" + refused +
         "]}";
}

// Null if no more signatures can be counted.
Graphs::Known* Graphs::known(const Tensors& inputs) {
  Signature signature{{}, settings()};
  signature.sizes.reserve(inputs.size());
  for (const at::Tensor& input : inputs) signature.sizes.push_back(input.sizes().vec());
  const auto found = known_.find(signature);
  if (found != known_.end()) return &found->second;
  return known_.size() < kMostKnown ? &known_[std::move(signature)] : nullptr;
}

void Graphs::count(Known& known) {
  ++known.uses;
  if (++calls_ % kAgeing != 0) return;
  for (auto& [signature, other] : known_) other.uses /= 2;
  std::erase_if(
      known_, [&](const auto& item) { return &item.second != &known && item.second.uses == 0 && !item.second.graph; });
}

size_t Graphs::graph_count() const {
  return std::count_if(known_.begin(), known_.end(), [](const auto& item) { return item.second.graph != nullptr; });
}

// Whether sizes may have a graph now. If there are as many as there may be, the least used one ends for sizes that are
// asked for or clearly more used: with more sizes than graphs, none would last.
bool Graphs::make_room(const Known& wanting) {
  if (graph_count() < kMost) return true;
  Known* least = nullptr;
  for (auto& [signature, known] : known_) {
    if (known.graph && !known.kept && (least == nullptr || known.uses < least->uses)) least = &known;
  }
  if (least == nullptr || (!wanting.kept && wanting.uses <= least->uses + kMargin)) return false;
  recorder_->wait_until_free();
  least->graph.reset();
  return true;
}

// Sets the graph, or the reason why there is none.
void Graphs::make_graph(Known& known, const Tensors& inputs) {
  const Tensors given = tellable(inputs);
  for (const auto how : {Recorder::Inputs::kMoved, Recorder::Inputs::kCopied}) {
    bool answered = false;
    try {
      known.graph = recorded(given, how, answered);
      if (how == Recorder::Inputs::kMoved && !known.kept) known.graph->inputs.clear();
      return;
    } catch (const std::exception& error) {
      // A call that fails says nothing about calls with other values.
      if (!answered && ++known.failures < kFailures && !known.kept) return;
      known.refusal = first_line(error.what());
    }
  }
  if (!warned_) TORCH_WARN("some sizes run without a CUDA graph: ", known.refusal);
  warned_ = true;
}

// `answered`: whether the code itself has answered.
std::unique_ptr<Graphs::Graph> Graphs::recorded(const Tensors& given, Recorder::Inputs how, bool& answered) {
  auto graph = std::make_unique<Graph>(Graph{how, apart_like(given), {}, nullptr});
  // What is not recorded runs meanwhile, on zeros and on memory that holds nothing yet, so that it is found out below.
  set_zero(graph->inputs);
  Tensors expected;
  // The first run loads kernels, which cannot be recorded, and says what the graph must answer.
  const auto prepare = [&] {
    for (const at::Tensor& output : call_(given)) {
      TORCH_CHECK(output.device() == device_, "an output is on ", output.device(), ", and a graph writes to ", device_);
      expected.push_back(output.clone());
    }
    answered = true;
  };
  const auto work = [&] {
    graph->outputs = call_(graph->inputs);
    return spans_of(graph->outputs);
  };
  recorder_->wait_until_free();
  graph->recording = recorder_->record(spans_of(graph->inputs), how, prepare, work);
  const Tensors answers = like(graph->outputs);
  set_noise(answers);
  launch(*graph, given, answers, current_stream());
  const bool same =
      answers.size() == expected.size() && std::equal(expected.begin(), expected.end(), answers.begin(), same_bits);
  TORCH_CHECK(same, "the graph does not answer as a call does: an operator works on another stream or on the host, or ",
              "two calls give different answers");
  return graph;
}

void Graphs::launch(Graph& graph, Tensors inputs, const Tensors& outputs, c10::Stream stream) {
  std::vector<const void*> from;
  for (at::Tensor& input : inputs) {
    const bool misplaced = reinterpret_cast<uintptr_t>(input.const_data_ptr()) % kAlignment != 0;
    if (graph.how == Recorder::Inputs::kMoved && misplaced) input = input.clone();
    from.push_back(input.const_data_ptr());
  }
  std::vector<void*> to;
  for (const at::Tensor& output : outputs) to.push_back(output.mutable_data_ptr());
  recorder_->acquire(stream);
  graph.recording->launch(stream, from, to);
  recorder_->release(stream);
}

c10::Stream Graphs::current_stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

}  // namespace exportkit
