// exportkit in C++: opens a package, checks it as exportkit.load does, and runs it. No Python is needed.
//
//     exportkit::Model model = exportkit::Model::open("model.pt2");
//     std::vector<at::Tensor> outputs = model.run({image, query});
//
// Built with one minor version of torch, and to be used with that one: find_package(exportkit) sees to it.
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

// What is hashed: what was not seen to hold before, or may have been changed since, by what the file system says of it;
// or everything again. exportkit/runtime/cache has the rules.
enum class Verify { kOnce, kAlways };

struct OpenOptions {
  // auto, cpu, cuda or cuda:<index>; auto is CUDA where the package has a target for it that runs here.
  std::string device = "auto";
  // The only target to run, by its name; none for the best one that runs here.
  std::optional<std::string> target;
  // How many calls can run at a time; they share the weights.
  int64_t runners = 1;
  // Whoever must have signed the package, any of them: PEM files, or PEM text. An Ed25519 key checks `.sig` files, one
  // on the curve P-256, P-384 or P-521 bundles of OpenSSF model signing. What this machine's policies ask for is asked
  // for as well.
  std::vector<std::string> public_keys;
  // The signature file, where it is not the package's name with `.sig`, or `.sigstore.json` for a bundle.
  std::string signature;
  Verify verify = Verify::kOnce;
  // Is told what is worth knowing and no error: that the cache cannot be used. Unset: stderr.
  std::function<void(const std::string&)> warn;
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

  // Puts another fine-tune's weights in the place of the model's, while calls go on: a safetensors file of all of the
  // model's state_dict, of its dtypes and shapes, in which a tied weight may be under any of its names. They are
  // copied, and are those of every copy of this Model. Each call runs with the old weights or with the new ones, never
  // with some of both: those that have begun finish on the old ones. One swap goes on at a time. One that fails, for
  // whatever reason, leaves the old ones in place. Needs memory for both while it lasts.
  //
  // WeightsError: they do not fit, or the model has none outside of its compiled code. ModelLoadError,
  // DigestMismatchError: the loader refused what it took before, or the package was written to since.
  void swap_weights(const std::string& path);

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
  explicit Model(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// Tensors of a safetensors file, by name: InputError.
EXPORTKIT_API std::map<std::string, at::Tensor> read_safetensors(const std::string& path);
EXPORTKIT_API void write_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors);

// Of the torch that runs, such as "2.13.0".
EXPORTKIT_API std::string torch_version();

}  // namespace exportkit
