#include "runtime/c_api_description.h"

#include "runtime/dlpack_tensors.h"
#include "runtime/inputs.h"

namespace exportkit {

Description::Tensors::Tensors(const std::vector<TensorInfo>& tensors) : shapes(tensors.size()) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& tensor = tensors[i];
    for (const SizeRange& size : tensor.shape) {
      const int64_t dimension = size.dimension ? static_cast<int64_t>(*size.dimension) : -1;
      shapes[i].items.push_back({size.min, size.max, size.step, size.text.c_str(), dimension, size.scale, size.offset});
    }
    shapes[i].point();
    infos.items.push_back({tensor.name.c_str(), tensor.dtype.c_str(), dl_dtype(dtype_of(tensor.dtype)),
                           static_cast<int32_t>(tensor.shape.size()), shapes[i].pointers.data(), tensor.written});
  }
  infos.point();
}

Description::Dimensions::Dimensions(const std::vector<DimensionRange>& dimensions) {
  for (const DimensionRange& dimension : dimensions) {
    infos.items.push_back({dimension.name.c_str(), dimension.min, dimension.max});
  }
  infos.point();
}

Description::Method::Method(const MethodInfo& method)
    : inputs(method.inputs), outputs(method.outputs), dimensions(method.dimensions) {}

Description::Case::Case(const Model& model, size_t index) {
  const auto recorded = model.case_calls(index);
  dimensions.resize(recorded.size());
  for (size_t i = 0; i < recorded.size(); ++i) {
    const MethodInfo& method = model.method(recorded[i].first);
    for (const DimensionRange& dimension : method.dimensions) {
      const auto found = recorded[i].second.find(dimension.name);
      dimensions[i].push_back(found == recorded[i].second.end() ? -1 : found->second);
    }
    calls.items.push_back({static_cast<size_t>(&method - model.methods().data()), dimensions[i].data()});
  }
  calls.point();
}

Description::Description(const Model& model)
    : device_(model.device().str()), state_(model.state()), state_dimensions_(model.state_dimensions()) {
  for (const MethodInfo& method : model.methods()) methods_.emplace_back(method);
  for (size_t i = 0; i < methods_.size(); ++i) {
    const MethodInfo& info = model.methods()[i];
    const auto& [inputs, outputs, dimensions] = methods_[i];
    method_infos_.items.push_back(
        {info.name.c_str(), info.stateful, inputs.infos.items.size(), inputs.infos.pointers.data(),
         outputs.infos.items.size(), outputs.infos.pointers.data(), dimensions.infos.items.size(),
         dimensions.infos.pointers.data(), info.state.size(), info.state.data(), info.state_written.data(),
         info.row_dimension ? static_cast<int64_t>(*info.row_dimension) : -1, info.row_reason.c_str()});
  }
  method_infos_.point();
  for (size_t i = 0; i < model.case_count(); ++i) cases_.emplace_back(model, i);
  for (const Case& recorded : cases_) {
    const auto& calls = recorded.calls;
    const int64_t* const first = calls.items.empty() ? nullptr : calls.items.front().dimensions;
    case_infos_.items.push_back({first, calls.items.size(), calls.pointers.data()});
  }
  case_infos_.point();
  description_.name = model.name().c_str(), description_.version = model.version().c_str();
  description_.target = model.target().c_str(), description_.device = device_.c_str();
  description_.dl_device = dl_device(model.device());
  if (const std::optional<size_t> method = model.default_index()) {
    const exportkit_method_info& usual = method_infos_.items[*method];
    description_.input_count = usual.input_count, description_.inputs = usual.inputs;
    description_.output_count = usual.output_count, description_.outputs = usual.outputs;
    description_.dimension_count = usual.dimension_count, description_.dimensions = usual.dimensions;
  }
  description_.case_count = case_infos_.items.size(), description_.cases = case_infos_.pointers.data();
  description_.method_count = method_infos_.items.size(), description_.methods = method_infos_.pointers.data();
  description_.state_count = state_.infos.items.size(), description_.state = state_.infos.pointers.data();
  description_.state_dimension_count = state_dimensions_.infos.items.size();
  description_.state_dimensions = state_dimensions_.infos.pointers.data();
  description_.bytes = model.bytes();
}

}  // namespace exportkit
