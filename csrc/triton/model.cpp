#include "triton/model.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "package/json.h"
#include "package/text.h"
#include "triton/errors.h"

namespace exportkit::triton {
namespace {

// The value of a key; an empty one if there is none.
template <class Value>
Value value_of(const std::map<std::string, Value>& all, const std::string& key) {
  const auto found = all.find(key);
  return found == all.end() ? Value() : found->second;
}

// Rows of a call, if config.pbtxt does not say how many.
constexpr int64_t kMostRows = 256;

std::string text_of(TRITONSERVER_Message* message) {
  const char* text = nullptr;
  size_t size = 0;
  check(TRITONSERVER_MessageSerializeToJson(message, &text, &size));
  return std::string(text, size);
}

std::string config_of(TRITONBACKEND_Model* model) {
  TRITONSERVER_Message* message = nullptr;
  check(TRITONBACKEND_ModelConfig(model, 1, &message));
  const std::string text = text_of(message);
  ignore(TRITONSERVER_MessageDelete(message));
  return text;
}

std::string name_of(TRITONBACKEND_Model* model) {
  const char* name = nullptr;
  check(TRITONBACKEND_ModelName(model, &name));
  return name;
}

std::string version_of(TRITONBACKEND_Model* model) {
  uint64_t version = 0;
  check(TRITONBACKEND_ModelVersion(model, &version));
  return std::to_string(version);
}

// Not by std::filesystem: libtorch exports that of another libstdc++.
std::vector<std::string> packages_in(const std::string& folder) {
  std::vector<std::string> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  if (entries == nullptr) throw Failure(TRITONSERVER_ERROR_NOT_FOUND, folder + ": " + std::strerror(errno));
  while (const dirent* const entry = readdir(entries.get())) {
    if (std::string_view(entry->d_name).ends_with(".pt2")) found.push_back(folder + "/" + entry->d_name);
  }
  std::ranges::sort(found);
  return found;
}

// The package of a version: the file that config.pbtxt names, or the folder's only .pt2. Without a config.pbtxt, Triton
// since 26.03 takes `model.pt2` for the PyTorch backend's, so it may have any name; and it says `model.exportkit`,
// which nobody gave.
std::string package_of(TRITONBACKEND_Model* model, const std::string& named) {
  TRITONBACKEND_ArtifactType type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
  const char* location = nullptr;
  check(TRITONBACKEND_ModelRepository(model, &type, &location));
  const std::string folder = std::string(location) + "/" + version_of(model);
  if (!named.empty() && named != "model.exportkit") return folder + "/" + named;
  const std::vector<std::string> found = packages_in(folder);
  if (found.size() == 1) return found[0];
  throw Failure(TRITONSERVER_ERROR_NOT_FOUND,
                folder + " must have one .pt2 file, it has " + (found.empty() ? "none" : joined(found)) +
                    ". Leave one there, or name it in config.pbtxt: default_model_filename.");
}

void check_parameters(const ModelConfig& config) {
  for (const auto& [name, value] : config.parameters) {
    if (name == "method" || name.starts_with("TRITON_")) continue;
    const bool graphs = name == "cuda_graphs";
    int64_t number = 0;
    const bool whole =
        std::from_chars(value.data(), value.data() + value.size(), number).ptr == value.data() + value.size();
    if (graphs ? value == "true" || value == "false" : name == "threads" && whole && number >= 0) continue;
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "config.pbtxt has the parameter `" + name + "` with the value `" + value +
                      "`. There are `method` (one of the package), `threads` (of a call on the CPU; 0: as many as "
                      "torch takes) and `cuda_graphs` (true or false).");
  }
}

// `public-key` is a PEM file, or several with colons between. What Triton gives to every backend is left alone; what is
// neither is refused, or a slip would leave packages unchecked.
void read_setting(Backend& backend, std::string_view name, const std::string& value) {
  static constexpr std::string_view kTritons[] = {"additional-dependency-dirs", "auto-complete-config",
                                                  "backend-directory", "default-max-batch-size",
                                                  "min-compute-capability"};
  if (name != "public-key") {
    if (std::ranges::find(kTritons, name) != std::end(kTritons)) return;
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "--backend-config=exportkit," + std::string(name) + " is not known. There is public-key=FILE.pem.");
  }
  for (size_t at = 0; at <= value.size();) {
    const size_t end = std::min(value.find(':', at), value.size());
    backend.public_keys.push_back(value.substr(at, end - at));
    at = end + 1;
  }
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
  options.runners = value_of(config.instances, device);
  options.public_keys = keys.data();
  options.public_key_count = keys.size();
  options.threads = std::atoll(value_of(config.parameters, "threads").c_str());
  if (value_of(config.parameters, "cuda_graphs") == "true") options.flags |= EXPORTKIT_CUDA_GRAPHS;
  options.warn = [](const char* message, void*) { log(TRITONSERVER_LOG_WARN, message); };
  call(exportkit_open, path.c_str(), &options, &handle_);
  call(exportkit_describe, handle_, &about_);
}

void Copy::choose_method(const ModelConfig& config) {
  const std::string asked = value_of(config.parameters, "method");
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

Backend::Backend(TRITONBACKEND_Backend* backend) {
  TRITONSERVER_Message* message = nullptr;
  check(TRITONBACKEND_BackendConfig(backend, &message));
  const std::string text = text_of(message);
  JsonReader json(text, 32);
  json.object([&](std::string_view part) {
    if (part != "cmdline") return json.skip();
    json.object([&](std::string_view name) { read_setting(*this, name, json.string()); });
  });
  ignore(TRITONSERVER_MetricFamilyNew(&sessions, TRITONSERVER_METRIC_KIND_GAUGE, "exportkit_sessions",
                                      "Number of open sessions of a model, one for each sequence"));
}

Backend::~Backend() {
  if (sessions != nullptr) ignore(TRITONSERVER_MetricFamilyDelete(sessions));
}

// --- the model -------------------------------------------------------------------------------------------------------

Model::Model(TRITONBACKEND_Model* model, const Backend& backend)
    : backend_(backend),
      name_(name_of(model)),
      config_text_(config_of(model)),
      config_(read_config(config_text_)),
      sessions_(backend.sessions, name_, version_of(model)) {
  check_parameters(config_);
  path_ = package_of(model, config_.file);
  for (const auto& [device, instances] : config_.instances) {
    Copy& copy = copy_on(device);
    if (served_.method == nullptr) serve(model, copy);
  }
}

Copy& Model::copy_on(const std::string& device) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Copy>& copy = copies_[device];
  if (copy != nullptr) return *copy;
  auto made = std::make_unique<Copy>(path_, device, config_, backend_.public_keys);
  if (served_.rows > 0 && made->try_rows(served_.rows).rows < served_.rows) {
    throw Failure(TRITONSERVER_ERROR_UNSUPPORTED, "on ", device, " calls cannot have ", served_.rows,
                  " rows, as on the first device");
  }
  if (made->method().stateful) {
    const int64_t instances = std::max<int64_t>(1, value_of(config_.instances, device));
    made->sequences = std::make_unique<Sequences>(made->handle(), config_.sequences, instances, sessions_);
  }
  copy = std::move(made);
  return *copy;
}

// Finds out which requests may be joined, and tells Triton what the package takes and gives.
void Model::serve(TRITONBACKEND_Model* model, Copy& copy) {
  bool complete = false;
  check(TRITONBACKEND_ModelAutoCompleteConfig(model, &complete));
  const exportkit_method_info& method = copy.method();
  if (config_.max_batch_size == 0 && (!complete || given_whole(config_, method))) {
    served_ = {&method, 0, "config.pbtxt has no max_batch_size, but all sizes of the inputs"};
  } else if (method.stateful && method.row_dimension >= 0 && method.dimensions[method.row_dimension]->min > 1) {
    served_ = {&method, 0, "each request has several rows, and of a sequence Triton joins requests of one row only"};
  } else {
    served_ = copy.try_rows(config_.max_batch_size > 0 ? config_.max_batch_size : kMostRows);
  }
  check_config(config_, served_);
  if (complete) {
    const std::string text = completed(config_, served_);
    TRITONSERVER_Message* message = nullptr;
    check(TRITONSERVER_MessageNewFromSerializedJson(&message, text.data(), text.size()));
    TRITONSERVER_Error* const error = TRITONBACKEND_ModelSetConfig(model, 1, message);
    ignore(TRITONSERVER_MessageDelete(message));
    check(error);
  }
  log(TRITONSERVER_LOG_INFO, concat(name_, ": ", path_, ": ", copy.text(), "; ",
                                    served_.rows > 0 ? concat("up to ", served_.rows, " rows in a call")
                                                     : "each request by itself: " + served_.alone));
}

// --- the sessions of sequences ---------------------------------------------------------------------------------------

Gauge::Gauge(TRITONSERVER_MetricFamily* family, const std::string& model, const std::string& version) {
  if (family == nullptr) return;
  const TRITONSERVER_Parameter* labels[] = {
      TRITONSERVER_ParameterNew("model", TRITONSERVER_PARAMETER_STRING, model.c_str()),
      TRITONSERVER_ParameterNew("version", TRITONSERVER_PARAMETER_STRING, version.c_str())};
  ignore(TRITONSERVER_MetricNew(&metric_, family, labels, 2));
  for (const TRITONSERVER_Parameter* label : labels) {
    TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(label));
  }
}

Gauge::~Gauge() {
  if (metric_ != nullptr) ignore(TRITONSERVER_MetricDelete(metric_));
}

void Gauge::add(double by) {
  if (metric_ != nullptr) ignore(TRITONSERVER_MetricIncrement(metric_, by));
}

Sequences::Sequences(exportkit_model model, const SequenceBatching& limits, int64_t instances, Gauge& gauge)
    : model_(model),
      idle_(2 * limits.idle_microseconds),
      most_(2 * static_cast<size_t>(limits.candidates * instances)),
      gauge_(gauge),
      closer_([this] { close_idle(); }) {}

Sequences::~Sequences() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  closer_.join();
  while (!resting_.empty()) close_oldest();
}

exportkit_session Sequences::begin(const std::vector<exportkit_size>& sizes) {
  exportkit_session session = 0;
  call(exportkit_open_session, model_, sizes.empty() ? nullptr : sizes.data(), sizes.size(), &session);
  gauge_.add(1);
  return session;
}

void Sequences::take(exportkit_session session) {
  const std::lock_guard lock(mutex_);
  const auto place = places_.find(session);
  if (place == places_.end()) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG,
                  "the sequence has no session: its first step failed, or no step came for too long. Begin it again "
                  "with sequence_start.");
  }
  resting_.erase(place->second);
  places_.erase(place);
}

void Sequences::give_back(exportkit_session session, bool last) {
  if (last) {
    exportkit_session_close(session, nullptr);
    gauge_.add(-1);
    return;
  }
  const std::lock_guard lock(mutex_);
  places_[session] = resting_.insert(resting_.end(), {session, Clock::now()});
  if (resting_.size() > most_) close_oldest();
  if (resting_.size() == 1) changed_.notify_one();
}

// In a thread of its own: closes what has rested for too long.
void Sequences::close_idle() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    if (resting_.empty()) {
      changed_.wait(lock);
    } else if (const Clock::time_point until = resting_.front().since + idle_; Clock::now() < until) {
      changed_.wait_until(lock, until);
    } else {
      close_oldest();
    }
  }
}

void Sequences::close_oldest() {
  exportkit_session_close(resting_.front().session, nullptr);
  gauge_.add(-1);
  places_.erase(resting_.front().session);
  resting_.pop_front();
}

}  // namespace exportkit::triton
