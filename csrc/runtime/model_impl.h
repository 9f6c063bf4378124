// What the copies of a Model and its sessions share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "exportkit/runtime.h"
#include "runtime/inputs.h"
#include "runtime/methods.h"
#include "runtime/opened_package.h"
#include "runtime/state.h"
#include "runtime/weights.h"

namespace exportkit {

// Members are in construction order: the code is destroyed before the files and weights that it uses.
struct Model::Impl {
  OpenedPackage package;
  std::vector<MethodInfo> methods;
  std::vector<TensorInfo> state;
  std::vector<DimensionRange> state_dimensions;
  std::vector<InputPlan> plans;          // of each method
  std::vector<CacheEntry> files;         // of each method's code
  std::optional<MappedWeights> weights;  // unset where others loaded the code
  uint64_t bytes = 0;                    // of the weights, on the device
  CurrentCode code;
  InitialState initial;

  Impl(const Opening& open, const OpenOptions& options);
  // A package that the caller has opened, with the code of each method that it has loaded: no weights are read again.
  Impl(const PackageReader& reader, const std::string& target, c10::Device device, CurrentCode::Methods loaded);

  const Manifest& manifest() const { return package.reader().manifest(); }

  // The place of a method, or of the default one: UsageError, which lists the methods.
  size_t index_of(const std::string& name) const;
  size_t default_index() const;
  // As above, for a call without a session: UsageError if the method has state.
  size_t without_session(size_t method) const;

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

}  // namespace exportkit
