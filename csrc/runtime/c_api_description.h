// What exportkit_describe returns.
#pragma once

#include <map>
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
  struct Cases {
    std::vector<std::vector<int64_t>> dimensions;
    List<exportkit_case_info> infos;

    explicit Cases(const Model& model);
  };

  std::string device_;
  Tensors inputs_, outputs_;
  List<exportkit_dimension> dimensions_;
  Cases cases_;
  exportkit_description description_;
};

}  // namespace exportkit
