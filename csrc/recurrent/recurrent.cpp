// Recurrent layers as operators of any length and batch: each calls torch's own layer, which picks the kernel (oneDNN,
// cuDNN, its own), so that the bits are eager's. torch.export would unroll the layers and so fix the length.
// exportkit/recurrent has the fakes and says how the operators get into a program.
//
// Sequences are time-major, [T, B, input], because torch's kernels are. With `batch_sizes`, which
// torch.nn.utils.rnn.pack_padded_sequence explains, they are packed: [N, input].
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <vector>

namespace exportkit_recurrent {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// torch's own refusals lose their text on the way through the stable ABI of 2.11, so that ours come first.
template <class... Parts>
void check(bool holds, const char* op, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// What a layer is, and the sizes of a call.
struct Layer {
  const char* op;
  bool biases;
  int64_t layers;
  bool bidirectional;
  bool requires_grad;     // whether eager's weights do
  bool projects = false;  // whether an LSTM does
  int64_t states() const { return layers * (bidirectional ? 2 : 1); }
};

// Checks that data is packed as batch_sizes say.
void check_packed(const char* op, const Tensor& data, const Tensor& batch_sizes) {
  check(batch_sizes.is_cpu() && batch_sizes.scalar_type() == ScalarType::Long && batch_sizes.dim() == 1, op,
        "batch_sizes must be int64[T] on the CPU");
  const Tensor sizes = torch::stable::contiguous(batch_sizes);
  const int64_t* size = sizes.const_data_ptr<int64_t>();
  int64_t rows = 0;
  for (int64_t t = 0; t < sizes.numel(); ++t) {
    check(size[t] > 0 && (t == 0 || size[t] <= size[t - 1]), op, "batch_sizes must be positive and must not grow, got ",
          size[t], " at ", t);
    check(size[t] <= data.size(0) - rows, op, "data has ", data.size(0), " rows, the batch sizes add up to more");
    rows += size[t];
  }
  check(sizes.numel() > 0, op, "the sequences must have at least one step");
  check(rows == data.size(0), op, "data has ", data.size(0), " rows, the batch sizes add up to ", rows);
}

int64_t batch_of(const Tensor& input, const std::optional<Tensor>& batch_sizes) {
  return batch_sizes ? torch::stable::contiguous(*batch_sizes).const_data_ptr<int64_t>()[0] : input.size(1);
}

// Checks the sizes that vary from call to call, and what tells a kernel where to read.
void check_call(const Layer& layer, const Tensor& input, const std::optional<Tensor>& batch_sizes,
                const Tensors& states, const Tensors& weights) {
  const int64_t each = 2 + (layer.biases ? 2 : 0) + (layer.projects ? 1 : 0);
  const auto given = static_cast<int64_t>(weights.size());
  check(layer.layers > 0 && layer.layers <= given && given == layer.states() * each, layer.op, given,
        " weights are not ", each, " for each of ", layer.layers, layer.bidirectional ? " layers, twice" : " layers");
  if (batch_sizes) {
    check(input.dim() == 2, layer.op, "packed data must be [N, input], got ", input.dim(), " dimensions");
    check_packed(layer.op, input, *batch_sizes);
  } else {
    check(input.dim() == 3, layer.op, "input must be [T, B, input], got ", input.dim(), " dimensions");
    check(input.size(0) > 0, layer.op, "the sequence must have at least one step");
  }
  check(weights[0].dim() == 2 && input.size(-1) == weights[0].size(1), layer.op, "input has ", input.size(-1),
        " features, which the weights do not take");
  const int64_t batch = batch_of(input, batch_sizes);
  for (const Tensor& state : states) {
    check(state.dim() == 3 && state.size(0) == layer.states() && state.size(1) == batch, layer.op,
          "an initial state must be [", layer.states(), ", ", batch, ", size]");
    check(state.scalar_type() == input.scalar_type(), layer.op, "input and initial states must have one dtype");
  }
  for (const Tensor& weight : weights) {
    check(weight.scalar_type() == input.scalar_type(), layer.op, "input and weights must have one dtype");
  }
}

// Calls an operator of torch. `count` is the number of its results.
template <size_t count, class... Args>
std::array<Tensor, count> call(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  static_assert(sizeof...(Args) >= count);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  std::array<Tensor, count> results;
  for (size_t i = 0; i < count; ++i) results[i] = torch::stable::detail::to<Tensor>(stack[i]);
  return results;
}

// torch's matmul multiplies sequences that are not contiguous in one product if the weights require gradients, and one
// by one otherwise (should_fold in ATen/native/LinearAlgebra.cpp), even where no gradient is computed. The last bits
// differ. Returns the same sequences, laid out so that they are multiplied as eager's are: rows at equal distances,
// with a gap, so that they are not contiguous, which torch would add the bias to in another order.
Tensor as_eagers(const Layer& layer, const Tensor& input) {
  const bool reordered = layer.requires_grad && input.is_cpu() && input.dim() == 3 && !input.is_contiguous();
  if (!reordered ||
      (std::string_view(layer.op) == "lstm" && !layer.projects && input.scalar_type() == ScalarType::Float)) {
    return input;  // oneDNN's, which makes it contiguous
  }
  constexpr int64_t kGap = 16;  // numbers
  Tensor rows = torch::stable::new_empty(input, {input.size(0), input.size(1), input.size(2) + kGap});
  Tensor found = torch::stable::narrow(rows, 2, 0, input.size(2));
  torch::stable::copy_(found, input);
  return found;
}

// Calls torch's layer without dropout, as in eval mode. `State` is a tensor, or a list of them for an LSTM.
template <size_t count, class State>
std::array<Tensor, count> torch_layer(const char* name, const Layer& layer, const Tensor& given,
                                      const std::optional<Tensor>& batch_sizes, const State& state,
                                      const Tensors& weights) {
  const Tensor input = as_eagers(layer, given);
  constexpr double kDropout = 0;
  constexpr bool kTrain = false, kBatchFirst = false;
  std::array<Tensor, count> results =
      batch_sizes ? call<count>(name, "data", input, *batch_sizes, state, weights, layer.biases, layer.layers, kDropout,
                                kTrain, layer.bidirectional)
                  : call<count>(name, "input", input, state, weights, layer.biases, layer.layers, kDropout, kTrain,
                                layer.bidirectional, kBatchFirst);
  for (Tensor& result : results) result = torch::stable::contiguous(result);  // as the fakes say
  return results;
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, std::optional<Tensor> batch_sizes, const Tensor& h,
                                        const Tensor& c, Tensors weights, bool biases, int64_t layers,
                                        bool bidirectional, bool requires_grad) {
  const Layer layer{"lstm", biases, layers, bidirectional, requires_grad, h.size(-1) != c.size(-1)};
  check_call(layer, input, batch_sizes, {h, c}, weights);
  auto [out, h_n, c_n] = torch_layer<3>("aten::lstm", layer, input, batch_sizes, Tensors{h, c}, weights);
  return {out, h_n, c_n};
}

std::tuple<Tensor, Tensor> one_state(const char* name, const Layer& layer, const Tensor& input,
                                     const std::optional<Tensor>& batch_sizes, const Tensor& h,
                                     const Tensors& weights) {
  check_call(layer, input, batch_sizes, {h}, weights);
  auto [out, h_n] = torch_layer<2>(name, layer, input, batch_sizes, h, weights);
  return {out, h_n};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input, std::optional<Tensor> batch_sizes, const Tensor& h, Tensors weights,
                               bool biases, int64_t layers, bool bidirectional, bool requires_grad) {
  return one_state("aten::gru", {"gru", biases, layers, bidirectional, requires_grad}, input, batch_sizes, h, weights);
}

std::tuple<Tensor, Tensor> rnn_tanh(const Tensor& input, std::optional<Tensor> batch_sizes, const Tensor& h,
                                    Tensors weights, bool biases, int64_t layers, bool bidirectional,
                                    bool requires_grad) {
  return one_state("aten::rnn_tanh", {"rnn_tanh", biases, layers, bidirectional, requires_grad}, input, batch_sizes, h,
                   weights);
}

std::tuple<Tensor, Tensor> rnn_relu(const Tensor& input, std::optional<Tensor> batch_sizes, const Tensor& h,
                                    Tensors weights, bool biases, int64_t layers, bool bidirectional,
                                    bool requires_grad) {
  return one_state("aten::rnn_relu", {"rnn_relu", biases, layers, bidirectional, requires_grad}, input, batch_sizes, h,
                   weights);
}

// torch's _pack_padded_sequence: sequences [T, B, ...], or [B, T, ...], to data [N, ...] and batch_sizes [longest].
std::tuple<Tensor, Tensor> pack(const Tensor& input, const Tensor& lengths, bool batch_first) {
  check(input.dim() >= 2, "pack", "input must be [T, B, ...] or [B, T, ...]");
  check(lengths.is_cpu() && lengths.scalar_type() == ScalarType::Long && lengths.dim() == 1, "pack",
        "lengths must be int64[B] on the CPU");
  const int64_t batch = input.size(batch_first ? 0 : 1), longest = input.size(batch_first ? 1 : 0);
  check(batch > 0 && lengths.size(0) == batch, "pack", lengths.size(0), " lengths were given for a batch of ", batch);
  const Tensor known = torch::stable::contiguous(lengths);
  const int64_t* length = known.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    check(length[b] > 0 && length[b] <= longest, "pack", "each length must be 1 to ", longest, ", got ", length[b]);
    check(b == 0 || length[b] <= length[b - 1], "pack", "lengths must not grow, got ", length[b], " after ",
          length[b - 1], "; enforce_sorted=False sorts them");
  }
  auto [data, batch_sizes] = call<2>("aten::_pack_padded_sequence", "", input, known, batch_first);
  return {torch::stable::contiguous(data), batch_sizes};
}

// The reverse: data [N, ...] to sequences [T, batch, ...] of `length` steps, and their lengths.
std::tuple<Tensor, Tensor> unpack(const Tensor& data, const Tensor& batch_sizes, double padding, int64_t length,
                                  int64_t batch) {
  check_packed("unpack", data, batch_sizes);
  const Tensor sizes = torch::stable::contiguous(batch_sizes);
  const int64_t* size = sizes.const_data_ptr<int64_t>();
  const int64_t steps = sizes.numel();
  check(length >= steps, "unpack", "total_length is ", length, ", the longest sequence has ", steps, " steps");
  check(batch == size[0], "unpack", "there are ", size[0], " sequences, not ", batch);
  std::vector<int64_t> shape{length, batch};
  for (int64_t dim = 1; dim < data.dim(); ++dim) shape.push_back(data.size(dim));
  Tensor padded = torch::stable::new_empty(data, shape);
  torch::stable::fill_(padded, padding);
  Tensor rows = torch::stable::contiguous(data);
  for (int64_t t = 0, end, row = 0; t < steps; t = end) {  // steps of one batch size are copied together
    for (end = t + 1; end < steps && size[end] == size[t];) ++end;
    Tensor some = torch::stable::narrow(rows, 0, row, (end - t) * size[t]);
    Tensor place = torch::stable::narrow(padded, 0, t, end - t);
    place = torch::stable::narrow(place, 1, 0, size[t]);
    shape[0] = end - t, shape[1] = size[t];
    torch::stable::copy_(place, torch::stable::view(some, shape));
    row += (end - t) * size[t];
  }
  Tensor lengths = torch::stable::new_empty(sizes, {batch});
  int64_t* to = lengths.mutable_data_ptr<int64_t>();
  for (int64_t b = 0, t = steps; b < batch; ++b) {
    while (size[t - 1] <= b) --t;
    to[b] = t;
  }
  return {padded, lengths};
}

}  // namespace

STABLE_TORCH_LIBRARY(exportkit_recurrent, m) {
  m.def(
      "lstm(Tensor input, Tensor? batch_sizes, Tensor h, Tensor c, Tensor[] weights, bool biases, int layers, bool "
      "bidirectional, bool requires_grad) -> (Tensor, Tensor, Tensor)");
  for (const char* schema : {
           "gru(Tensor input, Tensor? batch_sizes, Tensor h, Tensor[] weights, bool biases, int layers, bool "
           "bidirectional, bool requires_grad) -> (Tensor, Tensor)",
           "rnn_tanh(Tensor input, Tensor? batch_sizes, Tensor h, Tensor[] weights, bool biases, int layers, bool "
           "bidirectional, bool requires_grad) -> (Tensor, Tensor)",
           "rnn_relu(Tensor input, Tensor? batch_sizes, Tensor h, Tensor[] weights, bool biases, int layers, bool "
           "bidirectional, bool requires_grad) -> (Tensor, Tensor)",
           "pack(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)",
           "unpack(Tensor data, Tensor batch_sizes, float padding, SymInt length, SymInt batch) -> (Tensor, Tensor)",
       }) {
    m.def(schema);
  }
}

// One kernel for every device: torch's layer dispatches.
STABLE_TORCH_LIBRARY_IMPL(exportkit_recurrent, CompositeExplicitAutograd, m) {
  m.impl("lstm", TORCH_BOX(&lstm));
  m.impl("gru", TORCH_BOX(&gru));
  m.impl("rnn_tanh", TORCH_BOX(&rnn_tanh));
  m.impl("rnn_relu", TORCH_BOX(&rnn_relu));
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("unpack", TORCH_BOX(&unpack));
}

}  // namespace exportkit_recurrent
