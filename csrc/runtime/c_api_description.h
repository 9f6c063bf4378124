// What exportkit_describe returns.
#pragma once

#include <string>
#include <vector>

#include "exportkit/exportkit.h"
#include "exportkit/runtime.h"

namespace exportkit {

// The C structures that describe a model, with all that they point to.
class Description {
 public:
  explicit Description(const Model& model);
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  const exportkit_description& c() const { return description_; }

 private:
  // Structures, and pointers to them in the same order.
  template <class Structure>
  struct List {
    std::vector<Structure> items;
    std::vector<const Structure*> pointers;

    void point() {
      for (const Structure& item : items) pointers.push_back(&item);
    }
  };
  struct Tensors {
    std::vector<List<exportkit_size_range>> shapes;
    List<exportkit_tensor_info> infos;

    explicit Tensors(const std::vector<TensorInfo>& tensors);
  };
  struct Dimensions {
    List<exportkit_dimension> infos;

    explicit Dimensions(const std::vector<DimensionRange>& dimensions);
  };
  struct Method {
    Tensors inputs, outputs;
    Dimensions dimensions;

    explicit Method(const MethodInfo& method);
  };
  struct Case {
    std::vector<std::vector<int64_t>> dimensions;  // of each call
    List<exportkit_call_info> calls;

    Case(const Model& model, size_t index);
  };

  std::string device_;
  std::vector<Method> methods_;
  List<exportkit_method_info> method_infos_;
  Tensors state_;
  Dimensions state_dimensions_;
  std::vector<Case> cases_;
  List<exportkit_case_info> case_infos_;
  exportkit_description description_{};
};

}  // namespace exportkit
