// exportkit in C++: opens a package, checks it as exportkit.load does, and runs it. No Python is needed.
//
//     exportkit::Model model = exportkit::Model::open("model.pt2");
//     std::vector<at::Tensor> outputs = model.run({image, query});
//
// Built with one minor version of torch, and to be used with that one: find_package(exportkit) sees to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exportkit/errors.h"

#define EXPORTKIT_API __attribute__((visibility("default")))

namespace exportkit {

struct OpenOptions {
  // auto, cpu, cuda or cuda:<index>; auto is CUDA where the package has a target for it that runs here.
  std::string device = "auto";
  // The only target to run, by its name; none for the best one that runs here.
  std::optional<std::string> target;
  // How many calls can run at a time; they share the weights.
  int64_t runners = 1;
  // Whoever must have signed the package, any of them: PEM files of Ed25519 keys, or PEM text. What this machine's
  // policies ask for is asked for as well.
  std::vector<std::string> public_keys;
  // The signature file, where it is not the package's name with `.sig`.
  std::string signature;
};

// A size of a tensor: from `min` to `max`, in steps. One that is fixed has min == max.
struct SizeRange {
  int64_t min, max, step;
  std::string text;  // such as "16*gh", which is the same number wherever it stands; "?" where nothing is known
};

// An input or output.
struct TensorInfo {
  std::string name;   // its place in the call or result, such as "image" or "batch.mask"
  std::string dtype;  // such as "float32"
  std::vector<SizeRange> shape;
};

// A call that was recorded at export, with what the eager model answered, on the model's device.
struct RecordedCase {
  std::map<std::string, int64_t> sizes;  // of each dimension
  std::vector<at::Tensor> inputs, outputs;
};

// How an output compares with what it should be.
struct OutputReport {
  std::string name;
  int64_t compared, mismatched;  // elements
  double rtol, atol;
  std::optional<double> max_abs, max_rel;  // the greatest differences; none where nothing was compared by value
  std::string note;                        // what else there is to say
};

struct EXPORTKIT_API CaseReport {
  std::map<std::string, int64_t> sizes;
  std::vector<OutputReport> outputs;
  std::string problem;  // a wrong number of outputs, a wrong dtype or shape: then there is nothing to compare

  bool ok() const;
};

// An open package. Copies are of one model, which is closed with the last of them. Any number of threads may use it.
class EXPORTKIT_API Model {
 public:
  // Opens a package. Nothing of it is executed before it is known to be signed as it must be and every digest holds,
  // and no library before it is known to fit. Error: its name is that of the class in exportkit/errors.py.
  static Model open(const std::string& path, const OpenOptions& options = {});

  // Runs the model on inputs in the order of `inputs()`, on the current stream of its device. They must be on it.
  // InputError: the package does not allow these inputs; nothing was run. ModelRunError: the compiled code failed.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

  const std::string& name() const;
  const std::string& version() const;
  const std::string& target() const;  // which of the package's compiled models was chosen
  at::Device device() const;
  const std::vector<TensorInfo>& inputs() const;
  const std::vector<TensorInfo>& outputs() const;

  size_t case_count() const;
  // CaseError, DigestMismatchError.
  RecordedCase recorded_case(size_t index) const;
  // Runs a case again and compares, each output within its own recorded tolerance.
  CaseReport replay(size_t index) const;

  struct Impl;

 private:
  explicit Model(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

// Tensors of a safetensors file, by name: InputError.
EXPORTKIT_API std::map<std::string, at::Tensor> read_safetensors(const std::string& path);
EXPORTKIT_API void write_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors);

// Of the torch that runs, such as "2.13.0".
EXPORTKIT_API std::string torch_version();

}  // namespace exportkit
