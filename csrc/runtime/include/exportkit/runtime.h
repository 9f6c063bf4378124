// exportkit for C++ without Python: opens a package, checks it like exportkit.load, and runs it.
//
//     exportkit::Model model = exportkit::Model::open("model.pt2");
//     std::vector<at::Tensor> outputs = model.run({image, query});
//
// Use it with the minor version of torch that it was built with; find_package(exportkit) checks that.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
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
  // With graphs, the model's launches take turns, whatever the number of runners.
  CudaGraphs cuda_graphs = CudaGraphs::kNone;
  // PEM files or PEM text. One of these keys must have signed the package. Ed25519 keys check `.sig` files; keys on the
  // curve P-256, P-384 or P-521 check bundles of OpenSSF model signing. The policies of this machine add their own
  // requirements.
  std::vector<std::string> public_keys;
  // The signature file, if it is not the package's name with `.sig`, or `.sigstore.json` for a bundle.
  std::string signature;
  Verify verify = Verify::kOnce;
  // Called with warnings, such as a cache that cannot be used. If unset, warnings go to stderr.
  std::function<void(const std::string&)> warn;
};

// A size of a tensor: from `min` to `max`, in steps. A fixed size has min == max.
struct SizeRange {
  int64_t min, max, step;
  std::string text;  // such as "16*gh", where gh is the same number in all tensors; "?" if unknown
};

// A number that sizes depend on.
struct DimensionRange {
  std::string name;  // such as "gh"
  int64_t min, max;
};

// An input or output.
struct TensorInfo {
  std::string name;   // its place in the call or result, such as "image" or "batch.mask"
  std::string dtype;  // such as "float32"
  std::vector<SizeRange> shape;
};

// A call that was recorded at export, with the eager model's outputs, on the model's device.
struct RecordedCase {
  std::map<std::string, int64_t> sizes;  // of each dimension
  std::vector<at::Tensor> inputs, outputs;
  std::map<std::string, at::Tensor> references;  // by output, in a wider dtype, on the CPU
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

struct EXPORTKIT_API CaseReport {
  std::map<std::string, int64_t> sizes;
  std::vector<OutputReport> outputs;
  std::string problem;  // a wrong number of outputs, dtype or shape, which prevents the comparison; else empty

  bool ok() const;
};

// An open package. Copies share one model, which is closed with the last copy. Any number of threads may use it.
class EXPORTKIT_API Model {
 public:
  // Opens a package. Checks its required signatures and every digest before any of its code runs, and each library
  // before it is loaded. Throws Error, whose name is a class of exportkit/errors.py.
  static Model open(const std::string& path, const OpenOptions& options = {});

  // Runs the model on inputs in the order of `inputs()`, on the current stream of its device. The inputs must be on
  // that device. InputError: the package does not allow these inputs; nothing was run. ModelRunError: the compiled code
  // failed.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

  // Replaces the weights with another fine-tune's, while calls continue. `path` is a safetensors file with the model's
  // whole state_dict and the same dtypes and shapes; a tied weight may have any of its names. The tensors are copied.
  // All copies of this Model get the new weights. Each call runs with only the old weights or only the new ones;
  // running calls finish with the old ones. One swap runs at a time. A swap that fails leaves the old weights in place.
  // During the swap, both need memory. Graphs that `capture` made are made again.
  //
  // WeightsError: the weights do not fit, or the model's weights are inside the compiled code. ModelLoadError: the
  // loader refused the code that it loaded before. ModelRunError: the graphs cannot be made. DigestMismatchError: the
  // package was written to meanwhile.
  void swap_weights(const std::string& path);

  // Makes a CUDA graph for the sizes of the model's dimensions, such as {{"batch", 1}, {"gh", 28}}, and keeps it.
  // Returns the graph's own inputs: a call with these copies none. (Most graphs read any call's inputs where they are.)
  // After a swap of weights there are new ones. UsageError: the package does not allow these sizes, or the model was
  // opened without graphs. ModelRunError: calls with these sizes cannot be a graph; the message says why.
  std::vector<at::Tensor> capture(const std::map<std::string, int64_t>& sizes) const;
  // The graphs of a model that was opened with graphs, as JSON: {"memory": bytes, "graphs": [{"shapes": of all inputs,
  // "uses": n, "copies_inputs": bool}], "refused": [{"shapes", "reason"}]}. Older uses count less. UsageError as above.
  std::string cuda_graphs() const;

  const std::string& name() const;
  const std::string& version() const;
  const std::string& target() const;  // the name of the chosen target
  bool tf32() const;                  // whether eager was allowed TF32 when the cases were recorded
  at::Device device() const;
  const std::vector<TensorInfo>& inputs() const;
  const std::vector<TensorInfo>& outputs() const;
  const std::vector<DimensionRange>& dimensions() const;

  size_t case_count() const;
  // The number of each dimension in a recorded case.
  std::map<std::string, int64_t> case_sizes(size_t index) const;
  // Reads a recorded case: CaseError, DigestMismatchError.
  RecordedCase recorded_case(size_t index) const;
  // Runs a case again and compares each output by the rule of FORMAT.md. Meanwhile, CUDA rounds the factors of float32
  // products to TF32 exactly if eager could when the case was recorded, in the whole process; so one replay of a CUDA
  // model runs at a time.
  CaseReport replay(size_t index) const;

  struct Impl;

 private:
  explicit Model(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// Reads the tensors of a safetensors file, by name: InputError.
EXPORTKIT_API std::map<std::string, at::Tensor> read_safetensors(const std::string& path);
EXPORTKIT_API void write_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors);

// The version of the running torch, such as "2.13.0".
EXPORTKIT_API std::string torch_version();

}  // namespace exportkit
