#include "triton/copy.h"

#include "package/text.h"
#include "triton/errors.h"

namespace exportkit::triton {
namespace {

std::string parameter(const ModelConfig& config, const std::string& name) {
  const auto found = config.parameters.find(name);
  return found == config.parameters.end() ? "" : found->second;
}

}  // namespace

Copy::Copy(const std::string& path, const std::string& device, const ModelConfig& config,
           const std::vector<std::string>& public_keys) {
  try {
    open(path, device, config, public_keys);
    choose_method(config);
    if (method_->stateful) find_state_sizes();
    replay();
  } catch (...) {
    exportkit_close(handle_, nullptr);
    throw;
  }
}

Copy::~Copy() {
  sequences.reset();
  exportkit_close(handle_, nullptr);
}

void Copy::open(const std::string& path, const std::string& device, const ModelConfig& config,
                const std::vector<std::string>& public_keys) {
  std::vector<const char*> keys;
  for (const std::string& key : public_keys) keys.push_back(key.c_str());
  exportkit_open_options options = {};
  options.size = sizeof options;
  options.device = device.c_str();
  options.runners = devices_of(config)[device];
  options.public_keys = keys.data();
  options.public_key_count = keys.size();
  options.threads = std::atoll(parameter(config, "threads").c_str());
  if (parameter(config, "cuda_graphs") == "true") options.flags |= EXPORTKIT_CUDA_GRAPHS;
  options.warn = [](const char* message, void*) { log(TRITONSERVER_LOG_WARN, message); };
  call(exportkit_open, path.c_str(), &options, &handle_);
  call(exportkit_describe, handle_, &about_);
}

void Copy::choose_method(const ModelConfig& config) {
  const std::string asked = parameter(config, "method");
  std::vector<std::string> names;
  for (size_t i = 0; i < about_->method_count; ++i) {
    const exportkit_method_info* each = about_->methods[i];
    names.push_back(each->name);
    if (asked.empty() ? about_->method_count == 1 || names[i] == "forward" : names[i] == asked) method_ = each;
  }
  if (method_ == nullptr) {
    throw Failure(
        TRITONSERVER_ERROR_INVALID_ARG,
        asked.empty() ? "the package has several methods: " : "the package has no method `" + asked + "` but ",
        joined(names), ". Name one in config.pbtxt: parameters { key: \"method\" value { string_value: \"", names[0],
        "\" } }");
  }
  for (size_t i = 0; i < method_->input_count; ++i) {
    if (!method_->inputs[i]->written) continue;
    throw Failure(TRITONSERVER_ERROR_UNSUPPORTED, "the method writes into its input `", method_->inputs[i]->name,
                  "`, which no client would see");
  }
}

// The state's dimensions are the method's of the same name, whose numbers the first step's inputs have.
void Copy::find_state_sizes() {
  for (size_t k = 0; k < about_->state_dimension_count; ++k) {
    const exportkit_dimension& wanted = *about_->state_dimensions[k];
    StateSize size = {wanted.name, nullptr, 0, 0, wanted.min};
    for (size_t i = 0; i < method_->input_count; ++i) {
      for (int32_t axis = 0; axis < method_->inputs[i]->ndim; ++axis) {
        const exportkit_size_range* range = method_->inputs[i]->shape[axis];
        if (range->dimension < 0 || method_->dimensions[range->dimension]->name != std::string_view(wanted.name))
          continue;
        size = {wanted.name, range, i, axis, 0};
      }
    }
    if (size.axis == nullptr && wanted.min != wanted.max) {
      throw Failure(TRITONSERVER_ERROR_UNSUPPORTED, "the state has the size `", wanted.name,
                    "`, which no input of the method `", method_->name, "` has");
    }
    state_sizes_.push_back(size);
  }
}

// What does not give the recorded answers is not served; and the code is warm then.
void Copy::replay() const {
  for (size_t i = 0; i < about_->case_count; ++i) call(exportkit_replay, handle_, i);
}

Served Copy::try_rows(int64_t most) const {
  Served served = {method_, 0, ""};
  const char* reason = nullptr;
  call(exportkit_try_rows, handle_, method_->name, most, &served.rows, &reason);
  if (served.rows == 0) served.alone = reason;
  return served;
}

std::vector<exportkit_size> Copy::state_sizes(const std::vector<exportkit_request_input>& inputs) const {
  std::vector<exportkit_size> sizes;
  for (const StateSize& each : state_sizes_) {
    int64_t size = each.fixed;
    if (each.axis != nullptr) {
      const exportkit_request_input& input = inputs[each.input];
      if (input.ndim <= each.place) {
        throw Failure(TRITONSERVER_ERROR_INVALID_ARG, "`", method_->inputs[each.input]->name, "` has ", input.ndim,
                      " sizes, the package ", method_->inputs[each.input]->ndim);
      }
      size = (input.shape[each.place] - each.axis->offset) / each.axis->scale;
    }
    sizes.push_back({each.name, size});
  }
  return sizes;
}

std::string Copy::text() const {
  return concat(about_->name, " ", about_->version, ", target ", about_->target, " on ", about_->device, ", method ",
                method_->name);
}

}  // namespace exportkit::triton
