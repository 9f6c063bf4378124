#include "runtime/c_api_description.h"

#include "runtime/dlpack_tensors.h"
#include "runtime/inputs.h"

namespace exportkit {

template <class Kept>
const Kept& Description::keep(Kept kept) {
  const auto moved = std::make_shared<const Kept>(std::move(kept));
  kept_.push_back(moved);
  return *moved;
}

template <class Structure>
const Structure* const* Description::pointers(std::vector<Structure> structures) {
  std::vector<const Structure*> all;
  for (const Structure& each : keep(std::move(structures))) all.push_back(&each);
  return keep(std::move(all)).data();
}

const exportkit_tensor_info* const* Description::tensors(const std::vector<TensorInfo>& described) {
  std::vector<exportkit_tensor_info> infos;
  for (const TensorInfo& tensor : described) {
    std::vector<exportkit_size_range> shape;
    for (const SizeRange& size : tensor.shape) {
      const int64_t dimension = size.dimension ? static_cast<int64_t>(*size.dimension) : -1;
      shape.push_back({size.min, size.max, size.step, size.text.c_str(), dimension, size.scale, size.offset});
    }
    infos.push_back({tensor.name.c_str(), tensor.dtype.c_str(), dl_dtype(dtype_of(tensor.dtype)),
                     static_cast<int32_t>(tensor.shape.size()), pointers(std::move(shape)), tensor.written});
  }
  return pointers(std::move(infos));
}

const exportkit_dimension* const* Description::dimensions(const std::vector<DimensionRange>& described) {
  std::vector<exportkit_dimension> infos;
  for (const DimensionRange& dimension : described) {
    infos.push_back({dimension.name.c_str(), dimension.min, dimension.max});
  }
  return pointers(std::move(infos));
}

const exportkit_case_info* const* Description::cases(const Model& model) {
  std::vector<exportkit_case_info> infos;
  for (size_t i = 0; i < model.case_count(); ++i) {
    std::vector<exportkit_call_info> calls;
    for (const auto& [name, given] : model.case_calls(i)) {
      const MethodInfo& method = model.method(name);
      std::vector<int64_t> sizes;
      for (const DimensionRange& dimension : method.dimensions) {
        const auto found = given.find(dimension.name);
        sizes.push_back(found == given.end() ? -1 : found->second);
      }
      calls.push_back({static_cast<size_t>(&method - model.methods().data()), keep(std::move(sizes)).data()});
    }
    const int64_t* const first = calls.empty() ? nullptr : calls.front().dimensions;
    const size_t count = calls.size();
    infos.push_back({first, count, pointers(std::move(calls))});
  }
  return pointers(std::move(infos));
}

Description::Description(const Model& model) : device_(model.device().str()) {
  std::vector<exportkit_method_info> methods;
  for (const MethodInfo& info : model.methods()) {
    methods.push_back({info.name.c_str(), info.stateful, info.inputs.size(), tensors(info.inputs), info.outputs.size(),
                       tensors(info.outputs), info.dimensions.size(), dimensions(info.dimensions), info.state.size(),
                       info.state.data(), info.state_written.data(),
                       info.row_dimension ? static_cast<int64_t>(*info.row_dimension) : -1, info.row_reason.c_str()});
  }
  description_.name = model.name().c_str(), description_.version = model.version().c_str();
  description_.target = model.target().c_str(), description_.device = device_.c_str();
  description_.dl_device = dl_device(model.device());
  if (const std::optional<size_t> method = model.default_index()) {
    const exportkit_method_info& usual = methods[*method];
    description_.input_count = usual.input_count, description_.inputs = usual.inputs;
    description_.output_count = usual.output_count, description_.outputs = usual.outputs;
    description_.dimension_count = usual.dimension_count, description_.dimensions = usual.dimensions;
  }
  description_.case_count = model.case_count(), description_.cases = cases(model);
  description_.method_count = methods.size(), description_.methods = pointers(std::move(methods));
  description_.state_count = model.state().size(), description_.state = tensors(model.state());
  description_.state_dimension_count = model.state_dimensions().size();
  description_.state_dimensions = dimensions(model.state_dimensions());
  description_.bytes = model.bytes();
}

}  // namespace exportkit
