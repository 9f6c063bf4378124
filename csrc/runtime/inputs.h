// Checks the inputs of one method on one device. exportkit/runtime/inputs.py has the same messages, for calls with the
// module's signature.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <map>
#include <string>
#include <vector>

#include "package/errors.h"
#include "package/manifest.h"

namespace exportkit {

// Memory that a call uses: an input's, or that of a session's state.
struct Memory {
  uintptr_t begin, end;
  bool written;
  std::string name;  // such as "`cache`"
};

Memory memory_of(const at::Tensor& tensor, bool written, std::string name);

// What a session adds to the calls of a method.
struct StateInUse {
  std::map<std::string, int64_t> sizes;     // of the state's dimensions
  std::vector<at::Tensor> tensors;          // in the method's order
  std::vector<Memory> memory;               // of these tensors
  std::optional<at::Tensor> refused;        // what the method's calls on a GPU refused: Code::session_memory
  std::vector<at::Tensor>* last = nullptr;  // outputs that a graph may write to again: Graphs::run
};

// What is known of an input before its elements are.
struct InputShape {
  at::ScalarType dtype;
  at::IntArrayRef sizes;
};

class InputPlan {
 public:
  // `call` must outlive this object.
  InputPlan(const Call& call, c10::Device device);

  // Checks the inputs and makes them contiguous. Compiled code checks almost nothing: a wrong dtype makes it read
  // beyond its tensors, a size outside the exported range gives wrong numbers, and memory that it writes must not be
  // another input's. An input that is written must be contiguous already. InputError names the input, its value and
  // what is allowed. `state` is null without a session.
  std::vector<at::Tensor> prepare(const std::vector<at::Tensor>& inputs, const StateInUse* state = nullptr) const;

  // Checks dtypes and sizes alone: InputError.
  void check(const std::vector<InputShape>& inputs, const StateInUse* state) const;

 private:
  using Bound = std::map<std::string, std::pair<int64_t, std::string>>;  // each dimension's number, and what gave it

  static Bound bound_by(const StateInUse* state);
  void bind_size(at::IntArrayRef shape, const std::string& name, size_t axis, const Size& size, Bound& bound) const;
  void check_shape(at::IntArrayRef shape, const TensorInput& expected, Bound& bound) const;
  void check_memory(const std::vector<at::Tensor>& inputs, const StateInUse* state) const;

  const Call& call_;
  c10::Device device_;
  std::vector<at::ScalarType> dtypes_;
  bool writes_ = false;
};

// The names, such as "add, ask, embed".
template <class Named>
std::string names_of(const std::vector<Named>& all) {
  std::string names;
  for (const Named& each : all) names += (names.empty() ? "" : ", ") + each.name;
  return names;
}

// InputError if the number of tensors is not that of the inputs, which have names.
template <class Input>
void check_count(const std::vector<Input>& inputs, size_t given) {
  if (given == inputs.size()) return;
  throw Error(errors::kInput, std::to_string(given) + " tensors were given; the package takes " +
                                  std::to_string(inputs.size()) + ": (" + names_of(inputs) + ")");
}

// torch's dtype for a name such as "float32": InputError if the name is unknown.
at::ScalarType dtype_of(const std::string& name);

// The name of a dtype, such as "float32".
std::string dtype_name(at::ScalarType dtype);

// Where an input of the device must begin: at a multiple of so many bytes.
uintptr_t alignment_on(c10::Device device, size_t itemsize);

// Such as "[2, 3, 64, 64]".
std::string shape_text(at::IntArrayRef shape);

// Such as "float32[2, 3, 64, 64]".
std::string describe(const at::Tensor& tensor);

// Such as "16*gh + 2".
std::string expression(const Size& size);

}  // namespace exportkit
