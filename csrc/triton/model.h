// A model of Triton's: a package, opened on each device that has instances of it.
#pragma once

#include <exportkit/exportkit.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "triton/config.h"
#include "triton/copy.h"
#include "triton/sequences.h"
#include "triton/triton_interface.h"

namespace exportkit::triton {

// What all models share: the settings of --backend-config=exportkit,NAME=VALUE.
struct Backend {
  explicit Backend(TRITONBACKEND_Backend* backend);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  std::vector<std::string> public_keys;           // one of them must have signed each package
  TRITONSERVER_MetricFamily* sessions = nullptr;  // null without metrics
};

class Model {
 public:
  Model(TRITONBACKEND_Model* model, const Backend& backend);

  // The copy for an instance, opened if there is none yet. Failure.
  Copy& copy_on(const std::string& device);
  // The most rows of a call; 0: each request runs by itself, with all sizes of its tensors.
  int64_t rows() const { return served_.rows; }

 private:
  void serve(TRITONBACKEND_Model* model, Copy& copy);

  const Backend& backend_;
  std::string name_, path_, config_text_;
  ModelConfig config_;
  Served served_ = {};
  Gauge sessions_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Copy>> copies_;
};

}  // namespace exportkit::triton
