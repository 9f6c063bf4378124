#include "runtime/c_api_description.h"

#include "runtime/dlpack_tensors.h"
#include "runtime/inputs.h"

namespace exportkit {

Description::Tensors::Tensors(const std::vector<TensorInfo>& tensors) : shapes(tensors.size()) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& tensor = tensors[i];
    for (const SizeRange& size : tensor.shape) {
      shapes[i].items.push_back({size.min, size.max, size.step, size.text.c_str()});
    }
    shapes[i].point();
    infos.items.push_back({tensor.name.c_str(), tensor.dtype.c_str(), dl_dtype(dtype_of(tensor.dtype)),
                           static_cast<int32_t>(tensor.shape.size()), shapes[i].pointers.data()});
  }
  infos.point();
}

Description::Cases::Cases(const Model& model) : dimensions(model.case_count()) {
  for (size_t i = 0; i < dimensions.size(); ++i) {
    const std::map<std::string, int64_t> sizes = model.case_sizes(i);
    for (const DimensionRange& dimension : model.dimensions()) {
      const auto found = sizes.find(dimension.name);
      dimensions[i].push_back(found == sizes.end() ? -1 : found->second);
    }
    infos.items.push_back({dimensions[i].data()});
  }
  infos.point();
}

Description::Description(const Model& model)
    : device_(model.device().str()), inputs_(model.inputs()), outputs_(model.outputs()), cases_(model) {
  for (const DimensionRange& dimension : model.dimensions()) {
    dimensions_.items.push_back({dimension.name.c_str(), dimension.min, dimension.max});
  }
  dimensions_.point();
  description_ = {model.name().c_str(),           model.version().c_str(),
                  model.target().c_str(),         device_.c_str(),
                  dl_device(model.device()),      inputs_.infos.items.size(),
                  inputs_.infos.pointers.data(),  outputs_.infos.items.size(),
                  outputs_.infos.pointers.data(), dimensions_.items.size(),
                  dimensions_.pointers.data(),    cases_.infos.items.size(),
                  cases_.infos.pointers.data()};
}

}  // namespace exportkit
