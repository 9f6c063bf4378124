#include "runtime/graphs.h"

#include <ATen/Context.h>
#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "package/text.h"
#include "runtime/overlaps.h"
#include "runtime/streams.h"

namespace exportkit {
namespace {

using Tensors = Graphs::Tensors;

constexpr uint64_t kAgeing = 4096;     // calls, after which all uses count half: a workload may change
constexpr uintptr_t kAlignment = 256;  // of memory that torch allocates: kernels are chosen by their inputs' alignment
constexpr int kFailures = 3;           // calls that fail, after which these sizes get no graph
constexpr uint64_t kMargin = 8;        // uses more than another's, for taking its place: a capture costs some calls

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

std::vector<void*> addresses_of(const Tensors& tensors) {
  std::vector<void*> addresses;
  addresses.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) addresses.push_back(const_cast<void*>(tensor.const_data_ptr()));
  return addresses;
}

// --- tensors for the comparison of a graph with a call ---------------------------------------------------------------

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.contiguous().reshape(-1).view(at::kByte); }

// The same sizes, strides and dtypes, without values, on a device.
Tensors like(const Tensors& tensors, c10::Device device) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    made.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)));
  }
  return made;
}

// Whether tensors have the sizes, strides and dtypes of others.
bool laid_out_as(const Tensors& tensors, const Tensors& others) {
  return std::ranges::equal(tensors, others, [](const at::Tensor& one, const at::Tensor& other) {
    return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() && one.strides() == other.strides();
  });
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

// Whether a bit of a contiguous tensor is set. Of bytes, because not every dtype has `any`.
bool any_bit(const at::Tensor& tensor) { return bytes_of(tensor).any().item<bool>(); }

// A copy with the same values, but examples for tensors that are zero: these look like memory that nobody has read.
Tensors tellable(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    made.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
    if (any_bit(tensor)) {
      made.back().copy_(tensor);
    } else {
      set_example({made.back()});
    }
  }
  return made;
}

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) return false;
  return at::equal(bytes_of(one), bytes_of(other));
}

}  // namespace

struct Graphs::Graph {
  Tensors own;  // its arguments; only those that it copies, and the inputs that somebody asked for, stay
  Tensors outputs;
  std::unique_ptr<Recording> recording;

  bool copies() const {
    for (size_t i = 0; i < own.size(); ++i) {
      if (!recording->moves(i)) return true;
    }
    return false;
  }
  // Frees the own arguments that nobody uses: all but those that are copied and the first `asked`.
  void let_go(size_t asked) {
    for (size_t i = asked; i < own.size(); ++i) {
      if (recording->moves(i)) own[i].reset();
    }
  }
};

struct Graphs::Known {
  uint64_t uses = 0;
  int failures = 0;  // of calls, before there was a graph
  std::string refusal;
  std::unique_ptr<Graph> graph;
  std::optional<Captured> captured;  // if it was asked for. It is never the one that makes room
  std::vector<void*> apart;          // addresses of arguments that were looked at last
};

Graphs::Graphs(Options options, Call call, std::unique_ptr<Recorder> recorder)
    : options_(std::move(options)), call_(std::move(call)), recorder_(std::move(recorder)) {
  for (size_t i : options_.written) {
    if (i >= is_written_.size()) is_written_.resize(i + 1);
    is_written_[i] = true;
  }
}

Graphs::~Graphs() {
  try {
    recorder_->wait_until_free();
  } catch (...) {  // a broken device
  }
}

Tensors Graphs::run(const Tensors& arguments, Tensors* last) {
  const c10::AutoGradMode no_grad(false);
  const c10::Stream stream = current_stream(options_.device);
  const std::lock_guard lock(mutex_);
  Known* const known = this->known(arguments);
  refuse_overlaps(arguments, known);
  if (known == nullptr || recorder_->is_recorded(stream)) return call_(arguments);  // part of the caller's own graph
  count(*known);
  if (!known->graph && options_.on_first_use && known->refusal.empty() && make_room(*known)) {
    make_graph(*known, arguments);
  }
  if (!known->graph) return call_(arguments);
  const bool fit = last != nullptr && laid_out_as(*last, known->graph->outputs);
  Tensors outputs = fit ? *last : like(known->graph->outputs, options_.device);
  if (last != nullptr) *last = outputs;
  launch(*known->graph, arguments, outputs, stream);
  return outputs;
}

Tensors Graphs::capture(const Tensors& arguments, size_t own) {
  const c10::AutoGradMode no_grad(false);
  const Tensors examples = like(arguments, options_.device);
  set_example(examples);
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!recorder_->is_recorded(current_stream(options_.device)),
              "another graph is being captured on the current stream");
  Known* const known = this->known(examples);
  if (known != nullptr && !known->graph) {
    known->refusal.clear();
    known->captured = Captured{like(arguments, at::kMeta), own};
    if (make_room(*known)) make_graph(*known, examples);
  }
  const bool full = known == nullptr || (!known->graph && known->refusal.empty());
  TORCH_CHECK(!full, "a model has at most ", kMost, " graphs, and all of them were asked for");
  TORCH_CHECK(known->graph, known->refusal);
  known->captured = Captured{like(arguments, at::kMeta), own};
  Tensors& owned = known->graph->own;
  for (size_t i = 0; i < own; ++i) {
    if (!owned[i].defined()) owned[i] = examples[i];
  }
  return {owned.begin(), owned.begin() + own};
}

std::vector<Graphs::Captured> Graphs::captured() const {
  const std::lock_guard lock(mutex_);
  std::vector<Captured> all;
  for (const auto& [signature, known] : known_) {
    if (known.graph && known.captured) all.push_back(*known.captured);
  }
  return all;
}

std::string Graphs::report() const {
  const std::lock_guard lock(mutex_);
  std::string graphs, refused;
  for (const auto& [signature, known] : known_) {
    if (!known.graph && known.refusal.empty()) continue;
    std::string& list = known.graph ? graphs : refused;
    list += (list.empty() ? "" : ",") + ("{\"shapes\":" + shapes_of(signature));
    if (known.graph) {
      const bool copies = known.graph->copies();
      list += ",\"uses\":" + std::to_string(known.uses) + ",\"copies_inputs\":" + (copies ? "true}" : "false}");
    } else {
      list += ",\"reason\":" + json_text(known.refusal) + "}";
    }
  }
  return "{\"memory\":" + std::to_string(recorder_->memory()) + ",\"graphs\":[" + graphs + "],\"refused\":[" + refused +
         "]}";
}

std::string Graphs::shapes_of(const Signature& signature) {
  std::vector<std::vector<int64_t>> shapes;
  for (auto rank = signature.sizes.begin(); rank != signature.sizes.end(); rank += 1 + *rank) {
    shapes.emplace_back(rank + 1, rank + 1 + *rank);
  }
  return json_list(
      shapes, [](const auto& shape) { return json_list(shape, [](int64_t size) { return std::to_string(size); }); });
}

// Null if no more signatures can be counted.
Graphs::Known* Graphs::known(const Tensors& arguments) {
  Signature signature{{}, settings()};
  signature.sizes.reserve(4 * arguments.size());
  for (const at::Tensor& argument : arguments) {
    const at::IntArrayRef sizes = argument.sizes();
    signature.sizes.push_back(static_cast<int64_t>(sizes.size()));
    signature.sizes.insert(signature.sizes.end(), sizes.begin(), sizes.end());
  }
  const auto found = known_.find(signature);
  if (found != known_.end()) return &found->second;
  return known_.size() < kMostKnown ? &known_[std::move(signature)] : nullptr;
}

// What is written must not be read elsewhere: the code reads and writes in an order of its own. Addresses that are
// those of the last call with these sizes are not looked at again.
void Graphs::refuse_overlaps(const Tensors& arguments, Known* known) const {
  if (options_.written.empty() || !options_.overlaps_matter) return;
  std::vector<void*> addresses = addresses_of(arguments);
  if (known != nullptr && known->apart == addresses) return;
  struct Part {
    uintptr_t begin, end;
    bool written;
    size_t index;
  };
  std::vector<Part> parts;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(addresses[i]);
    if (const size_t bytes = arguments[i].nbytes(); bytes > 0)
      parts.push_back({begin, begin + bytes, is_written(i), i});
  }
  std::vector<const Part*> all;
  for (const Part& part : parts) all.push_back(&part);
  const auto [one, other] = overlapping(all);
  TORCH_CHECK(one == nullptr, "arguments ", one->index, " and ", other->index,
              " share memory, and the code writes to one of them");
  if (known != nullptr) known->apart = std::move(addresses);
}

void Graphs::count(Known& known) {
  ++known.uses;
  if (++calls_ % kAgeing != 0) return;
  for (auto& [signature, other] : known_) other.uses /= 2;
  std::erase_if(
      known_, [&](const auto& item) { return &item.second != &known && item.second.uses == 0 && !item.second.graph; });
}

// Whether sizes may have a graph now. If there are as many as there may be, the least used one ends for sizes that are
// asked for or clearly more used: with more sizes than graphs, none would last.
bool Graphs::make_room(const Known& wanting) {
  size_t graphs = 0;
  Known* least = nullptr;
  for (auto& [signature, known] : known_) {
    if (!known.graph) continue;
    ++graphs;
    if (!known.captured && (least == nullptr || known.uses < least->uses)) least = &known;
  }
  if (graphs < kMost) return true;
  if (least == nullptr || (!wanting.captured && wanting.uses <= least->uses + kMargin)) return false;
  recorder_->wait_until_free();
  least->graph.reset();
  return true;
}

// Sets the graph, or the reason why there is none. The arguments stay as they are.
void Graphs::make_graph(Known& known, const Tensors& arguments) {
  for (const auto how : {Recorder::Arguments::kMoved, Recorder::Arguments::kCopied}) {
    bool answered = false;
    try {
      known.graph = recorded(tellable(arguments), how, answered);
      known.graph->let_go(known.captured ? known.captured->own : 0);
      return;
    } catch (const std::exception& error) {
      // A call that fails says nothing about calls with other values.
      if (!answered && ++known.failures < kFailures && !known.captured) return;
      known.refusal = first_line(error.what());
    }
  }
  if (!warned_) TORCH_WARN("some sizes run without a CUDA graph: ", known.refusal);
  warned_ = true;
}

// `answered`: whether the code itself has answered.
std::unique_ptr<Graphs::Graph> Graphs::recorded(const Tensors& given, Recorder::Arguments how, bool& answered) {
  auto graph = std::make_unique<Graph>(Graph{apart_like(given), {}, nullptr});
  // What is not recorded runs meanwhile, on zeros and on memory that holds nothing yet, so that it is found out below.
  set_zero(graph->own);
  Tensors expected;
  // The first run loads kernels, which cannot be recorded, and says what the graph must do.
  const auto prepare = [&] {
    const Tensors arguments = with_written_copied(given);
    for (const at::Tensor& output : call_(arguments)) {
      TORCH_CHECK(output.device() == options_.device, "an output is on ", output.device(), ", and a graph writes to ",
                  options_.device);
      expected.push_back(output.clone());
    }
    for (size_t i : options_.written) expected.push_back(arguments[i]);
    answered = true;
  };
  const auto work = [&] {
    graph->outputs = call_(graph->own);
    return spans_of(graph->outputs);
  };
  recorder_->wait_until_free();
  graph->recording = recorder_->record(spans_of(graph->own), options_.written, how, prepare, work);
  compare(*graph, given, expected);
  return graph;
}

// The same tensors, but copies of those that the code writes.
Tensors Graphs::with_written_copied(Tensors arguments) const {
  for (size_t i : options_.written) arguments[i] = arguments[i].clone();
  return arguments;
}

// Throws if a graph does something else than the call whose outputs and written arguments were as `expected`.
void Graphs::compare(Graph& graph, const Tensors& given, const Tensors& expected) {
  const Tensors arguments = with_written_copied(given);
  Tensors results = like(graph.outputs, options_.device);
  set_noise(results);
  launch(graph, arguments, results, current_stream(options_.device));
  for (size_t i : options_.written) results.push_back(arguments[i]);
  TORCH_CHECK(std::ranges::equal(expected, results, same_bits),
              "the graph does not answer as a call does: an operator works on another stream or on the host, or ",
              "two calls give different answers");
  // Its memory goes back to torch, and others get it.
  for (size_t i : options_.written) {
    TORCH_CHECK(!graph.recording->moves(i) || !any_bit(graph.own[i]), "the graph writes argument ", i,
                " where it was recorded, too");
  }
}

void Graphs::launch(Graph& graph, const Tensors& arguments, const Tensors& outputs, c10::Stream stream) {
  std::vector<void*> addresses = addresses_of(arguments);
  std::vector<std::pair<size_t, at::Tensor>> misplaced;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (reinterpret_cast<uintptr_t>(addresses[i]) % kAlignment == 0 || !graph.recording->moves(i)) continue;
    misplaced.emplace_back(i, arguments[i].clone());
    addresses[i] = misplaced.back().second.mutable_data_ptr();
  }
  recorder_->acquire(stream);
  graph.recording->launch(stream, addresses, addresses_of(outputs));
  recorder_->release(stream);
  for (const auto& [i, copy] : misplaced) {
    if (is_written(i)) arguments[i].copy_(copy);
  }
}

}  // namespace exportkit
