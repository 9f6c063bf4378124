#include "triton/tensors.h"

#include <algorithm>
#include <string_view>

#include "package/json_text.h"
#include "package/text.h"
#include "triton/errors.h"

namespace exportkit::triton {
namespace {

struct Dtype {
  std::string_view package, config;
  TRITONSERVER_DataType triton;
};

constexpr Dtype kDtypes[] = {
    {"bool", "TYPE_BOOL", TRITONSERVER_TYPE_BOOL},       {"uint8", "TYPE_UINT8", TRITONSERVER_TYPE_UINT8},
    {"uint16", "TYPE_UINT16", TRITONSERVER_TYPE_UINT16}, {"uint32", "TYPE_UINT32", TRITONSERVER_TYPE_UINT32},
    {"uint64", "TYPE_UINT64", TRITONSERVER_TYPE_UINT64}, {"int8", "TYPE_INT8", TRITONSERVER_TYPE_INT8},
    {"int16", "TYPE_INT16", TRITONSERVER_TYPE_INT16},    {"int32", "TYPE_INT32", TRITONSERVER_TYPE_INT32},
    {"int64", "TYPE_INT64", TRITONSERVER_TYPE_INT64},    {"float16", "TYPE_FP16", TRITONSERVER_TYPE_FP16},
    {"float32", "TYPE_FP32", TRITONSERVER_TYPE_FP32},    {"float64", "TYPE_FP64", TRITONSERVER_TYPE_FP64},
    {"bfloat16", "TYPE_BF16", TRITONSERVER_TYPE_BF16},
};

const Dtype& dtype_of(const exportkit_tensor_info& tensor) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.package == tensor.dtype) return dtype;
  }
  throw Failure(TRITONSERVER_ERROR_UNSUPPORTED,
                "`" + std::string(tensor.name) + "` is " + tensor.dtype + ", which Triton's protocol does not have");
}

bool fixed(const exportkit_size_range& size) { return size.min == size.max && size.min > 0; }

std::string shown(const std::vector<int64_t>& dims) {
  std::vector<std::string> parts;
  for (const int64_t size : dims) parts.push_back(std::to_string(size));
  return "[" + joined(parts) + "]";
}

// The sizes that the configuration has; -1 varies. A scalar has none: Triton's least is [1], of which the reshape of a
// batch makes a scalar for each row.
std::vector<int64_t> dims_of(const exportkit_tensor_info& tensor, bool batched) {
  std::vector<int64_t> dims;
  for (int32_t axis = batched ? 1 : 0; axis < tensor.ndim; ++axis) {
    dims.push_back(fixed(*tensor.shape[axis]) ? tensor.shape[axis]->min : -1);
  }
  if (dims.empty() && !batched) dims.push_back(1);
  return dims;
}

std::string tensor_config(const exportkit_tensor_info& tensor, bool batched) {
  if (*tensor.name == '\0') throw Failure(TRITONSERVER_ERROR_UNSUPPORTED, "a tensor has no name, which Triton demands");
  const std::vector<int64_t> dims = dims_of(tensor, batched);
  JsonMembers members = {{"name", json_text(tensor.name)},
                         {"data_type", json_text(dtype_of(tensor).config)},
                         {"dims", dims.empty() ? "[1]" : shown(dims)}};
  if (dims.empty()) members.emplace_back("reshape", R"({"shape":[]})");
  return json_object(members);
}

// Whether sizes of config.pbtxt are some of those that the package has.
bool within(const std::vector<int64_t>& given, const exportkit_tensor_info& tensor, bool batched) {
  const std::vector<int64_t> dims = dims_of(tensor, batched);
  if (given.size() != dims.size()) return false;
  if (tensor.ndim == 0) return given == dims;
  for (size_t i = 0; i < given.size(); ++i) {
    const exportkit_size_range& size = *tensor.shape[i + (batched ? 1 : 0)];
    const bool inside =
        given[i] >= size.min && given[i] <= size.max && (size.step <= 1 || (given[i] - size.min) % size.step == 0);
    if (given[i] != -1 && size.max > 0 && !inside) return false;
  }
  return true;
}

}  // namespace

TRITONSERVER_DataType triton_dtype(const exportkit_tensor_info& tensor) { return dtype_of(tensor).triton; }

std::string tensors_config(TensorInfos tensors, bool batched) {
  return json_list(tensors, [&](const exportkit_tensor_info* tensor) { return tensor_config(*tensor, batched); });
}

void check_given(const std::string& kind, const std::vector<GivenTensor>& given, TensorInfos tensors, bool batched,
                 bool all) {
  const auto refuse = [&](const std::string& why) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "config.pbtxt contradicts the package: " + why + ". Without `" + kind +
                      "` it is completed from the package: " + tensors_config(tensors, batched));
  };
  for (const GivenTensor& each : given) {
    const auto found = std::ranges::find_if(tensors, [&](const auto* tensor) { return each.name == tensor->name; });
    if (found == tensors.end()) refuse("there is no " + kind + " `" + each.name + "`");
    const exportkit_tensor_info& tensor = **found;
    if (each.dtype != dtype_of(tensor).config) {
      refuse("`" + each.name + "` is " + each.dtype + ", the package has " + tensor.dtype);
    }
    if (!within(each.dims, tensor, batched)) {
      refuse("`" + each.name + "` has the dims " + shown(each.dims) + ", the package " +
             shown(dims_of(tensor, batched)));
    }
  }
  for (const auto* tensor : tensors) {
    const bool listed = std::ranges::any_of(given, [&](const GivenTensor& each) { return each.name == tensor->name; });
    if (all && !listed) refuse("it does not have the " + kind + " `" + tensor->name + "`");
  }
}

}  // namespace exportkit::triton
