// Triton's configuration of a model: what config.pbtxt says, and its completion from the package.
#pragma once

#include <exportkit/exportkit.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "triton/triton_interface.h"

namespace exportkit::triton {

// The implicit state in which Triton keeps the number of a sequence's session.
inline constexpr const char* kState = "exportkit.session";
inline constexpr int64_t kStateBytes = sizeof(exportkit_session);

struct GivenTensor {
  std::string name, dtype;    // such as TYPE_FP32
  std::vector<int64_t> dims;  // without the rows of a batch
};

struct SequenceBatching {
  bool given = false, oldest = false, state = false;
  int64_t idle_microseconds = 60'000'000;  // Triton's own default, a second, is short for a person who speaks
  int64_t candidates = 1024;
};

// What the backend reads of a model's configuration. What is missing is as here.
struct ModelConfig {
  std::string file;
  int64_t max_batch_size = 0;
  std::vector<GivenTensor> inputs, outputs;
  std::string_view inputs_json = "[]", outputs_json = "[]";  // parts of the configuration's text
  std::map<std::string, std::string> parameters;
  std::map<std::string, int64_t> instances;  // how many each device has, such as "cpu", "cuda:1" or "auto"
  bool dynamic_batching = false;
  SequenceBatching sequences;
};

// `json` must outlive the result. JsonError.
ModelConfig read_config(std::string_view json);

// A method as Triton sees it. With `rows`, requests are joined to calls of up to so many; else each runs by itself.
struct Served {
  const exportkit_method_info* method;
  int64_t rows;
  std::string alone;  // why there are no rows
};

// Whether config.pbtxt itself gives tensors with all sizes of the package, which says that requests are not joined.
bool given_whole(const ModelConfig& config, const exportkit_method_info& method);

// Failure: the configuration contradicts the package.
void check_config(const ModelConfig& config, const Served& served);

// The complete configuration, as far as Triton takes it from a backend.
std::string completed(const ModelConfig& config, const Served& served);

// Failure: Triton has no such dtype.
TRITONSERVER_DataType triton_dtype(const exportkit_tensor_info& tensor);

}  // namespace exportkit::triton
