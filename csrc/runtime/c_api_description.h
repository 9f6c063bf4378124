// What exportkit_describe returns.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exportkit/exportkit.h"
#include "exportkit/runtime.h"

namespace exportkit {

// The C structures that describe a model, with all that they point to.
class Description {
 public:
  // `model` must outlive this object: its strings are not copied.
  explicit Description(const Model& model);
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  const exportkit_description& c() const { return description_; }

 private:
  template <class Kept>
  const Kept& keep(Kept kept);
  template <class Structure>
  const Structure* const* pointers(std::vector<Structure> structures);
  const exportkit_tensor_info* const* tensors(const std::vector<TensorInfo>& described);
  const exportkit_dimension* const* dimensions(const std::vector<DimensionRange>& described);
  const exportkit_case_info* const* cases(const Model& model);

  std::vector<std::shared_ptr<const void>> kept_;
  const std::string device_;
  exportkit_description description_{};
};

}  // namespace exportkit
