// exportkit for C++ without Python: opens a package, checks it like exportkit.load, and runs it.
//
//     exportkit::Model model = exportkit::Model::open("model.pt2");
//     std::vector<at::Tensor> outputs = model.run({image, query});
//
//     exportkit::Session session = model.session();  // of a model with state
//     session.run("prefill", {prompt});
//
// Use it with the minor version of torch that it was built with; find_package(exportkit) checks that.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exportkit/errors.h"

#define EXPORTKIT_API __attribute__((visibility("default")))

namespace exportkit {

// What to hash. kOnce: only files that are new or may have changed, by the rules in exportkit/runtime/cache. kAlways:
// everything.
enum class Verify { kOnce, kAlways };

// Which calls of a model on CUDA run as CUDA graphs: as one launch instead of one per kernel. A graph has its own
// memory, and answers as the model does, bit for bit. kOnFirstUse: calls with any sizes, up to 64. The first call with
// each of them takes longer. kCaptured: only the sizes that `Model::capture` gets.
enum class CudaGraphs { kNone, kCaptured, kOnFirstUse };

struct OpenOptions {
  // auto, cpu, cuda or cuda:<index>; auto is CUDA if the package has a CUDA target that runs here.
  std::string device = "auto";
  // The name of the target to run. If unset, the best target that runs here.
  std::optional<std::string> target;
  // The number of calls that can run at the same time. They share the weights.
  int64_t runners = 1;
  // The number of CPU threads of a call; 0: as many as torch takes in the thread that calls.
  int64_t threads = 0;
  // With graphs, the model's launches take turns, whatever the number of runners.
  CudaGraphs cuda_graphs = CudaGraphs::kNone;
  // PEM files or PEM text. One of these keys must have signed the package. Ed25519 keys check `.sig` files; keys on the
  // curve P-256, P-384 or P-521 check bundles of OpenSSF model signing. The policies of this machine add their own
  // requirements.
  std::vector<std::string> public_keys;
  // The signature file, if it is not the package's name with `.sig`, or `.sigstore.json` for a bundle.
  std::string signature;
  // The content of a signature file, in place of one. Beside a package that has no path there is none.
  std::string signature_content;
  // How many bytes of a pipe or a socket are taken, which may never end.
  uint64_t stream_limit = uint64_t{8} << 30;
  Verify verify = Verify::kOnce;
  // Called with warnings, such as a cache that cannot be used. If unset, warnings go to stderr.
  std::function<void(const std::string&)> warn;
};

// A size of a tensor: from `min` to `max`, in steps. A fixed size has min == max.
struct SizeRange {
  int64_t min, max, step;
  std::string text;  // such as "16*gh", where gh is the same number in all tensors; "?" if unknown
  // scale * size of the dimension + offset, where that is an index of the method's or the state's dimensions; unset if
  // the size is fixed or unknown.
  std::optional<size_t> dimension = {};
  int64_t scale = 0, offset = 0;
};

// A number that sizes depend on.
struct DimensionRange {
  std::string name;  // such as "gh"
  int64_t min, max;
};

// An input, an output, or a tensor of the state.
struct TensorInfo {
  std::string name;   // its place in the call or result, such as "image" or "batch.mask"; a state's name
  std::string dtype;  // such as "float32"
  std::vector<SizeRange> shape;
  bool written = false;  // whether the call writes into this input
};

// One entry of a model. Most models have only `forward`.
struct MethodInfo {
  std::string name;
  std::vector<TensorInfo> inputs, outputs;
  std::vector<DimensionRange> dimensions;
  bool stateful;                       // it needs a session
  std::vector<size_t> state;           // that it uses: indices of Model::state
  std::vector<int32_t> state_written;  // for each of them
  // The dimension that is the first size of every input, output and state, and no other size; unset: row_reason says
  // why there is none.
  std::optional<size_t> row_dimension;
  std::string row_reason;
};

// A call that was recorded at export, with the eager model's outputs, on the model's device.
struct RecordedCall {
  std::string method;
  std::map<std::string, int64_t> sizes;  // of each dimension
  std::vector<at::Tensor> inputs, outputs;
  std::map<std::string, at::Tensor> written;     // by input, what eager wrote into it
  std::map<std::string, at::Tensor> references;  // by output or `written.<input>`, in a wider dtype, on the CPU
};

// Calls that follow one another in one session. A call of a method without state is a case of its own.
struct RecordedCase {
  std::vector<RecordedCall> calls;
  std::map<std::string, at::Tensor> state, state_references;  // after the last call; empty if they were not recorded
  std::string edge_case;  // what makes the inputs edge values, such as "ties in x"; empty if they were only drawn
};

// An error relative to the magnitude of the reference, and the greatest one that FORMAT.md allows.
struct OutputError {
  double rms, rms_allowed, greatest, greatest_allowed;
};

// The comparison of an output with its expected value.
struct EXPORTKIT_API OutputReport {
  std::string name;
  int64_t compared, mismatched;  // elements
  double rtol, atol;
  std::optional<double> max_abs, max_rel;  // the greatest differences from eager; unset if no values were compared
  std::string note;                        // further remarks; may be empty
  std::optional<OutputError> error;        // for an output that is compared with a reference, instead of rtol and atol

  bool ok() const;
  // The name, how many elements differ, by how much, and what is allowed.
  std::string text() const;
};

struct EXPORTKIT_API CallReport {
  std::string method;
  std::map<std::string, int64_t> sizes;
  std::vector<OutputReport> outputs;  // and what the call wrote, as `written.<input>`
  std::string problem;  // a wrong number of outputs, dtype or shape, which prevents the comparison; else empty

  bool ok() const;
};

struct EXPORTKIT_API CaseReport {
  std::vector<CallReport> calls;    // up to the first with a problem
  std::vector<OutputReport> state;  // after the last call
  std::string edge_case;            // of RecordedCase

  bool ok() const;
};

class Session;

// An open package. Copies and sessions share one model, which is closed with the last of them. Any number of threads
// may use it.
class EXPORTKIT_API Model {
 public:
  // Opens a package. Checks its required signatures and every digest before any of its code runs, and each library
  // before it is loaded. Throws Error, whose name is a class of exportkit/errors.py.
  static Model open(const std::string& path, const OpenOptions& options = {});
  // The same for the content of a package. It is copied once, into memory that is sealed before anything is checked, so
  // the caller may change or free the bytes afterwards. The weights lie in this copy, which workers can share.
  static Model open(std::span<const std::byte> bytes, const OpenOptions& options = {});
  // The same for an open descriptor, which stays the caller's. A file is read by offset from its beginning, and its
  // weights are mapped; a memfd that is sealed against writing and resizing is never copied. A pipe or a socket is read
  // to its end, into sealed memory.
  static Model open_descriptor(int descriptor, const OpenOptions& options = {});

  // Runs a method on inputs in the order of its `inputs`, on the current stream of the model's device. The inputs must
  // be on that device. Without a name, it is `forward`, or the only method. UsageError: there is no such method, or it
  // has state and needs a session. InputError: the package does not allow these inputs; nothing was run. An input that
  // the call writes must be contiguous and share no memory with another one. ModelRunError: the compiled code failed.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> run(const std::string& method, const std::vector<at::Tensor>& inputs) const;

  // A new session, with a state of its own that begins as it was at export. `sizes` has the number of each of the
  // `state_dimensions`, such as {{"batch", 8}}. UsageError: the model has no state, or the sizes are not those that it
  // takes. ModelRunError: the device has no room for the state.
  Session session(const std::map<std::string, int64_t>& sizes = {}) const;

  // Waits for the current stream of a GPU. RefusedValueError: a call on it refused a value, which a call on a GPU else
  // says at the next one. Its outputs are not to be used.
  void synchronize() const;

  // Replaces the weights with another fine-tune's, while calls continue. `path` is a safetensors file with the model's
  // whole state_dict and the same dtypes and shapes; a tied weight may have any of its names. The tensors are copied.
  // State may be left out; sessions go on beginning as at export, so other state is refused.
  // All copies of this Model and its sessions get the new weights; state stays as it is. Each call runs with only the
  // old weights or only the new ones; running calls finish with the old ones. One swap runs at a time. A swap that
  // fails leaves the old weights in place. During the swap, both need memory. Graphs that `capture` made are made
  // again.
  //
  // WeightsError: the weights do not fit, come with other state than sessions begin with, or are inside the compiled
  // code. ModelLoadError: the loader refused the code that it loaded before. ModelRunError: the graphs cannot be made.
  // DigestMismatchError: the package was written to meanwhile.
  void swap_weights(const std::string& path);

  // Makes a CUDA graph for the sizes of a method's dimensions, such as {{"batch", 1}, {"gh", 28}}, and keeps it.
  // Returns the graph's own inputs: a call with these copies none. (Most graphs read any call's inputs where they are.)
  // After a swap of weights there are new ones. UsageError: the package does not allow these sizes, or the model was
  // opened without graphs. ModelRunError: calls with these sizes cannot be a graph; the message says why.
  std::vector<at::Tensor> capture(const std::map<std::string, int64_t>& sizes) const;
  std::vector<at::Tensor> capture(const std::string& method, const std::map<std::string, int64_t>& sizes) const;
  // The graphs of a model that was opened with graphs, as JSON: {"memory": bytes, "graphs": [{"shapes": of all inputs,
  // "uses": n, "copies_inputs": bool}], "refused": [{"shapes", "reason"}]}. Older uses count less. UsageError as above.
  std::string cuda_graphs() const;
  std::string cuda_graphs(const std::string& method) const;

  const std::string& name() const;
  const std::string& version() const;
  const std::string& target() const;  // the name of the chosen target
  bool tf32() const;                  // whether eager was allowed TF32 when the cases were recorded
  at::Device device() const;

  const std::vector<MethodInfo>& methods() const;
  // UsageError, which lists the methods.
  const MethodInfo& method(const std::string& name) const;
  // What a call without a name means, as an index of `methods()`: `forward`, or the only method; unset if there are
  // several others. `default_method` then throws UsageError.
  std::optional<size_t> default_index() const;
  const MethodInfo& default_method() const;
  const std::vector<TensorInfo>& inputs() const { return default_method().inputs; }
  const std::vector<TensorInfo>& outputs() const { return default_method().outputs; }
  const std::vector<DimensionRange>& dimensions() const { return default_method().dimensions; }
  // What a session has, and the dimensions of its sizes.
  const std::vector<TensorInfo>& state() const;
  const std::vector<DimensionRange>& state_dimensions() const;
  // What the weights take of the device's memory.
  uint64_t bytes() const;

  size_t case_count() const;
  // The calls of a recorded case: the method, and the number of each of its dimensions.
  std::vector<std::pair<std::string, std::map<std::string, int64_t>>> case_calls(size_t index) const;
  // Reads a recorded case: CaseError, DigestMismatchError.
  RecordedCase recorded_case(size_t index) const;
  // Runs a case again, in a session of its own, and compares each output by the rule of FORMAT.md. Meanwhile, CUDA
  // rounds the factors of float32 products to TF32 exactly if eager could when the case was recorded, in the whole
  // process; so one replay of a CUDA model runs at a time.
  CaseReport replay(size_t index) const;

  struct Impl;
  // For this library:
  explicit Model(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// What a model remembers from call to call: tensors on its device, which its methods read and write in place. Copies
// share one session; `fork` makes another one. A session has one caller at a time: SessionBusyError for a second one.
// Sessions are independent of each other, and run in any number of threads. On CUDA, calls on different streams wait
// for each other.
class EXPORTKIT_API Session {
 public:
  // As Model::run, and methods with state as well. An InputError leaves the state as it was. If the compiled code
  // fails in a method that writes state, that may be half written: SessionBrokenError from then on, until `reset` or
  // `load_state`.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  std::vector<at::Tensor> run(const std::string& method, const std::vector<at::Tensor>& inputs);

  // As Model::synchronize, for this session's calls: it is broken if a method that writes state refused a value.
  void synchronize();

  // A new session with a copy of this one's state.
  Session fork() const;
  // The state becomes what it was at export.
  void reset();

  // Writes the state to a safetensors file, which gets its name when it is complete. StateError: it cannot be written.
  void save(const std::string& path) const;
  // Reads what `save` wrote, here or in another process. StateError: the file does not exist, is another model's, or
  // has other names, dtypes or shapes; the state stays as it was.
  void load_state(const std::string& path);
  // Sets the state that a safetensors file names, in every row or in one, and returns its names. The file may be an
  // adapter of PEFT's beside its adapter_config.json: docs/learning.md. UsageError: there is no such row. StateError: a
  // tensor fits none of the state's. The state then stays as it was.
  std::vector<std::string> load_partial_state(const std::string& path, std::optional<int64_t> row = std::nullopt);

  // The tensors of the state, by name, in the package's order. They are the session's own: the next call changes them.
  // SessionBusyError: a call runs while some are shared with other sessions.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  int64_t state_bytes() const;  // of the tensors that are the session's own already
  bool broken() const;

  struct Impl;
  const std::shared_ptr<Impl>& impl() const { return impl_; }  // for this library

 private:
  friend class Model;
  explicit Session(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// Reads the tensors of a safetensors file, by name: InputError.
EXPORTKIT_API std::map<std::string, at::Tensor> read_safetensors(const std::string& path);
EXPORTKIT_API void write_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors);

// The version of the running torch, such as "2.13.0".
EXPORTKIT_API std::string torch_version();

}  // namespace exportkit
