// What a call must look like, for one package on one device. exportkit/runtime/inputs.py has the same words, for calls
// of the module's own signature.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "package/manifest.h"

namespace exportkit {

class InputPlan {
 public:
  InputPlan(const Call& call, c10::Device device);

  // The inputs, contiguous where they were not. Compiled code checks next to nothing: another dtype reads beyond its
  // tensors, a size outside of the exported range gives wrong numbers. InputError says which part, what was given and
  // what is allowed.
  std::vector<at::Tensor> prepare(const std::vector<at::Tensor>& inputs) const;

 private:
  const Call& call_;
  c10::Device device_;
  std::vector<at::ScalarType> dtypes_;
};

// torch's dtype of a name such as "float32": InputError for an unknown one.
at::ScalarType dtype_of(const std::string& name);

// The name of torch's dtype, such as "float32".
std::string dtype_name(at::ScalarType dtype);

// Such as "[2, 3, 64, 64]".
std::string shape_text(at::IntArrayRef shape);

// Such as "float32[2, 3, 64, 64]".
std::string describe(const at::Tensor& tensor);

// Such as "16*gh + 2".
std::string expression(const Size& size);

// What a size is where its dimension has this number. A manifest may ask for more than an int64_t holds: the nearest
// one, which no tensor has.
int64_t size_at(const Size& size, int64_t number);

}  // namespace exportkit
