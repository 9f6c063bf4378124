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

// A graph has fixed sizes. It uses arguments where they are, inputs and state alike, or copies those for which that is
// not possible, and copies outputs into new tensors. One that does not do what the code itself does is not used, and
// those sizes run without one. To find out, it runs on copies: what a call writes is written once.
//
// Any number of threads may use it. Their launches take turns; on the GPU, graphs of different streams wait for one
// another, because they share memory.
class Graphs {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Call = std::function<Tensors(const Tensors&)>;

  static constexpr size_t kMost = 64;         // graphs; the least used one makes room
  static constexpr size_t kMostKnown = 1024;  // signatures whose calls are counted

  struct Options {
    c10::Device device;
    bool on_first_use = false;    // sizes get a graph when they are called, else only by `capture`
    std::vector<size_t> written;  // the arguments that the code writes in place, by index
    bool overlaps_matter = true;  // whether what is written must be held against the other arguments' memory
  };
  // What was given to `capture`.
  struct Captured {
    Tensors arguments;  // without values
    size_t own;
  };

  // `call` runs the code on the current stream; its calls take turns.
  Graphs(Options options, Call call, std::unique_ptr<Recorder> recorder);
  ~Graphs();

  // Runs contiguous arguments on the current stream: inputs, then state. Throws what `call` throws, and c10::Error if
  // an argument that is written shares memory with another. `last`: the outputs of a call that nobody uses any more,
  // which a graph writes to again if they fit; the outputs of this call afterwards. A graph is launched sooner then:
  // the driver takes some microseconds for each address that changes.
  Tensors run(const Tensors& arguments, Tensors* last = nullptr);

  // Makes a graph for the sizes of `arguments`, whose values do not matter, and keeps it. Returns the first `own` of
  // the graph's own arguments: who calls with these inputs saves the copy. c10::Error if there can be no graph.
  Tensors capture(const Tensors& arguments, size_t own);

  // The graphs that `capture` made.
  std::vector<Captured> captured() const;

  // JSON: {"memory": bytes, "graphs": [{"shapes": [[...]], "uses": n, "copies_inputs": bool}],
  // "refused": [{"shapes", "reason"}]}, where inputs are all arguments.
  std::string report() const;

 private:
  // What a graph is made for: the rank and the sizes of each argument, and torch's settings that choose kernels.
  struct Signature {
    std::vector<int64_t> sizes;
    std::array<int, 6> settings;
    auto operator<=>(const Signature&) const = default;
  };
  struct Graph;
  struct Known;

  Known* known(const Tensors& arguments);
  bool make_room(const Known& wanting);
  void make_graph(Known& known, const Tensors& arguments);
  std::unique_ptr<Graph> recorded(const Tensors& given, Recorder::Arguments how, bool& answered);
  void compare(Graph& graph, const Tensors& given, const Tensors& expected);
  void launch(Graph& graph, const Tensors& arguments, const Tensors& outputs, c10::Stream stream);
  void refuse_overlaps(const Tensors& arguments, Known* known) const;
  Tensors with_written_copied(Tensors arguments) const;
  static std::string shapes_of(const Signature& signature);
  void count(Known& known);
  bool is_written(size_t argument) const { return argument < is_written_.size() && is_written_[argument]; }

  const Options options_;
  std::vector<bool> is_written_;  // of each argument
  const Call call_;
  const std::unique_ptr<Recorder> recorder_;
  mutable std::mutex mutex_;  // guards what follows, `call_` and the recorder
  std::map<Signature, Known> known_;
  uint64_t calls_ = 0;
  bool warned_ = false;
};

}  // namespace exportkit
