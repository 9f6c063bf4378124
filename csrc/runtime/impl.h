// What the copies of a Model, and of a Session, share: the opened package, its code and its state.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exportkit/runtime.h"
#include "package/cache.h"
#include "package/targets.h"
#include "package/trust.h"
#include "runtime/code.h"
#include "runtime/inputs.h"
#include "runtime/methods.h"
#include "runtime/state.h"
#include "runtime/weights.h"

namespace exportkit {

// Loads a target's operator libraries in a process without Python, each namespace from one build, once, and compares
// every operator of the graph with the manifest, which is trusted to say which namespaces a library defines.
// exportkit/libraries.py does this in a process with Python.
//
// Loading a second library for a registered namespace would end the process, so each library is first compared with the
// registered operators. TorchVersionError, LibraryConflictError, LibraryLoadError, MissingLibraryError,
// SchemaChangedError; the error of a wrong record.
void load_operators(const PackageReader& reader, const Target& target, const Unpacking& how);

// Opens the file of a package, once the options were checked.
using Opening = std::function<OpenedFile()>;

// A checked package. Opening it runs no code from it.
class OpenedPackage {
 public:
  // Opens a package, checks its required signatures and every digest, and picks a target that runs here. Runs no code
  // of the package. Throws the errors of exportkit.load.
  OpenedPackage(const Opening& open, OpenOptions options);
  // A package that the caller has opened and checked, and a target that it has loaded. Both must outlive this object.
  OpenedPackage(const PackageReader& reader, const std::string& target, c10::Device device);

  const PackageReader& reader() const { return reader_; }
  const Target& target() const { return *choice_.target; }
  c10::Device device() const;
  bool cuda_graphs() const { return options_.cuda_graphs != CudaGraphs::kNone; }

  // Loads the target's operator libraries, then unpacks the files of each of its methods.
  std::vector<CacheEntry> unpacked() const;
  // Loads the compiled code of a method, after the operators: ModelLoadError. `weights` are on the model's device; they
  // and the files must outlive the code. DigestMismatchError: the package was written to since it was opened.
  std::shared_ptr<const Code> load_code(const Method& method, const CacheEntry& files, const Weights& weights) const;

 private:
  Choice verified_choice() const;

  OpenOptions options_;
  SignatureRequest asked_;
  std::optional<PackageReader> own_;
  const PackageReader& reader_;
  Choice choice_;
};

// Members are in construction order: the code is destroyed before the files and weights that it uses.
struct Model::Impl {
  OpenedPackage package;
  std::vector<MethodInfo> methods = describe_methods(manifest());
  std::vector<TensorInfo> state = describe_state(manifest());
  std::vector<DimensionRange> state_dimensions = exportkit::state_dimensions(manifest());
  std::vector<InputPlan> plans;          // of each method
  std::vector<CacheEntry> files;         // of each method's code
  std::optional<MappedWeights> weights;  // unset where others loaded the code
  uint64_t bytes = 0;                    // of the weights, on the device
  CurrentCode code;
  InitialState initial{package.reader(), package.device()};

  Impl(const Opening& open, const OpenOptions& options);
  // A package that the caller has opened, with the code of each method that it has loaded: no weights are read again.
  Impl(const PackageReader& reader, const std::string& target, c10::Device device, CurrentCode::Methods loaded);

  const Manifest& manifest() const { return package.reader().manifest(); }

  // The place of a method, or of the default one: UsageError, which lists the methods.
  size_t index_of(const std::string& name) const;
  size_t default_index() const;

  // Loads the code of all methods with these weights, which are on the CPU. The device gets one copy.
  CurrentCode::Methods load(const Weights& weights) const;

  // Throws if a call that has ended refused a value, in a session or else on the current stream: RefusedValueError.
  void look(size_t method, const std::optional<at::Tensor>& refused) const;
  // Waits for the current stream.
  void wait() const;

  // Runs a method on prepared inputs: ModelRunError.
  std::vector<at::Tensor> run(size_t method, const std::vector<at::Tensor>& prepared, const StateInUse* state) const;

  // Adds a new state, of which the method's dimensions have these sizes, to the arguments of its code.
  void add_state(size_t method, const Sizes& sizes, std::vector<at::Tensor>& arguments) const;

  void need_graphs() const;
};

// Calls on different streams wait for each other, and no memory is used again while one of them needs it.
class StreamOrder {
 public:
  explicit StreamOrder(c10::Device device);

  void begin(const std::vector<at::Tensor>& state);
  void end();

 private:
  c10::Device device_;
  std::optional<c10::Event> last_;
  std::set<c10::StreamId> seen_;
};

struct Session::Impl {
  std::shared_ptr<Model::Impl> model;
  Sizes sizes;
  std::vector<at::Tensor> state;
  std::set<size_t> shared;  // of `state`: tensors that other sessions have, too; those that it has once stay its own
  std::mutex owning;        // of `shared`, which others may look at while a call runs
  std::vector<StateInUse> methods;
  StreamOrder order;
  std::atomic<bool> busy = false, broken = false;
  std::string problem;  // why it is broken

  Impl(std::shared_ptr<Model::Impl> of, Sizes given, std::vector<at::Tensor> tensors, std::set<size_t> of_others);

  const std::string& name() const { return model->manifest().name; }

  // Throws if the state may be half written, or an earlier call refused a value.
  void need_whole();
  void break_for(const std::string& why) noexcept;
  template <class Write>
  void replace(const char* what, const Write& write, bool whole = true);
  // Copies values into the state, or into one row of it.
  void set(const StateTensors& values, std::optional<int64_t> row);
  // Makes the session's own copies of the shared tensors that a method writes, or of those that are wanted.
  // ModelRunError: no room.
  void own(size_t method);
  void own(const std::set<size_t>& wanted);

  std::vector<at::Tensor> run(size_t method, const std::vector<at::Tensor>& inputs);
  // The same, and Session::synchronize, for one who has the turn.
  std::vector<at::Tensor> run_in_turn(size_t method, const std::vector<at::Tensor>& inputs);
  void wait_in_turn();
};

// The only use of a session while this object lives: SessionBusyError.
class Turn {
 public:
  explicit Turn(Session::Impl& session);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Session::Impl& session_;
};

}  // namespace exportkit
