// Launches all kernels of a call at once, as a graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/recorder.h"

namespace exportkit {

// A graph has fixed sizes. It reads inputs where they are, or copies them if that is not possible, and copies outputs
// into new tensors. One that does not answer as the code itself does is not used, and those sizes run without one.
//
// Any number of threads may use it. Their launches take turns; on the GPU, graphs of different streams wait for one
// another, because they share memory.
class Graphs {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Call = std::function<Tensors(const Tensors&)>;

  static constexpr size_t kMost = 64;         // graphs; the least used one makes room
  static constexpr size_t kMostKnown = 1024;  // signatures whose calls are counted

  // `call` runs the code on the current stream; its calls take turns. With `on_first_use`, sizes get a graph when they
  // are called, else only by `capture`.
  Graphs(c10::Device device, Call call, std::unique_ptr<Recorder> recorder, bool on_first_use);
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  // Runs contiguous inputs on the current stream. Throws what `call` throws.
  Tensors run(const Tensors& inputs);

  // Makes a graph for the sizes of `inputs`, whose values do not matter, and keeps it. Returns the graph's own inputs:
  // who calls with these saves the copy. c10::Error if there can be no graph.
  Tensors capture(const Tensors& inputs);

  // The inputs of the graphs that `capture` made.
  std::vector<Tensors> kept() const;

  // JSON: {"memory": bytes, "graphs": [{"shapes": [[...]], "uses": n, "copies_inputs": bool}],
  // "refused": [{"shapes", "reason"}]}.
  std::string report() const;

 private:
  // What a graph is made for: the inputs' sizes, and torch's settings that choose kernels.
  struct Signature {
    std::vector<std::vector<int64_t>> sizes;
    std::array<int, 6> settings;
    auto operator<=>(const Signature&) const = default;
  };
  struct Graph;
  struct Known;

  Known* known(const Tensors& inputs);
  bool make_room(const Known& wanting);
  void make_graph(Known& known, const Tensors& inputs);
  std::unique_ptr<Graph> recorded(const Tensors& given, Recorder::Inputs how, bool& answered);
  void launch(Graph& graph, Tensors inputs, const Tensors& outputs, c10::Stream stream);
  void count(Known& known);
  size_t graph_count() const;
  c10::Stream current_stream() const;

  const c10::Device device_;
  const Call call_;
  const std::unique_ptr<Recorder> recorder_;
  const bool on_first_use_;
  mutable std::mutex mutex_;  // guards what follows, `call_` and the recorder
  std::map<Signature, Known> known_;
  uint64_t calls_ = 0;
  bool warned_ = false;
};

}  // namespace exportkit
