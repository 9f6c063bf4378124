// A model of Triton's: a package, opened on each device that has instances of it.
#pragma once

#include <exportkit/exportkit.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "triton/config.h"
#include "triton/triton_interface.h"

namespace exportkit::triton {

// The number of open sessions of a model, among Triton's metrics. Without metrics it does nothing.
class Gauge {
 public:
  Gauge(TRITONSERVER_MetricFamily* family, const std::string& model, const std::string& version);
  ~Gauge();
  Gauge(const Gauge&) = delete;
  Gauge& operator=(const Gauge&) = delete;

  void add(double by);

 private:
  TRITONSERVER_Metric* metric_ = nullptr;
};

// Each sequence has a session. Triton keeps its number as the sequence's implicit state. A table by Triton's
// correlation id would be wrong: the first step of a sequence can run before the last one of another sequence with the
// same id.
//
// A session belongs to a step while that runs, and rests between. Of a sequence that Triton ends because it is idle, or
// because its id begins again, the backend hears nothing: so a session is closed when it has rested for twice the time
// after which Triton ends a sequence (a step may wait for its turn meanwhile), and the one that has rested longest when
// there are twice as many as Triton may have.
class Sequences {
 public:
  // `instances` of the model have sequences of their own.
  Sequences(exportkit_model model, const SequenceBatching& limits, int64_t instances, Gauge& gauge);
  ~Sequences();

  // A new session for a step. Failure.
  exportkit_session begin(const std::vector<exportkit_size>& sizes);
  // The session of a sequence, for a step. Failure: there is none.
  void take(exportkit_session session);
  // Ends a step, and the sequence if it was the last one.
  void give_back(exportkit_session session, bool last);

 private:
  using Clock = std::chrono::steady_clock;
  struct Resting {
    exportkit_session session;
    Clock::time_point since;
  };

  void close_idle();
  void close_oldest();

  const exportkit_model model_;
  const std::chrono::microseconds idle_;
  const size_t most_;
  Gauge& gauge_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::list<Resting> resting_;  // the first has rested longest
  std::unordered_map<exportkit_session, std::list<Resting>::iterator> places_;
  std::thread closer_;
};

// A size of a new session's state: that of an input of the first step, or a fixed one.
struct StateSize {
  const char* name;
  const exportkit_size_range* axis;  // null: `fixed`
  size_t input;
  int32_t place;
  int64_t fixed;
};

// What the model keeps for its instances on the device.
class Copy {
 public:
  // `public_keys`: one of them must have signed the package. Failure.
  Copy(const std::string& path, const std::string& device, const ModelConfig& config,
       const std::vector<std::string>& public_keys);
  ~Copy();

  exportkit_model handle() const { return handle_; }
  const exportkit_method_info& method() const { return *method_; }
  const DLDevice& device() const { return about_->dl_device; }
  // How many requests may be in a call, of up to so many rows.
  Served try_rows(int64_t most) const;
  // How large the state of a sequence is that begins with these inputs. Failure.
  std::vector<exportkit_size> state_sizes(const std::vector<exportkit_request_input>& inputs) const;
  // One line about the package.
  std::string text() const;

  std::unique_ptr<Sequences> sequences;  // of a method with state

 private:
  void open(const std::string& path, const std::string& device, const ModelConfig& config,
            const std::vector<std::string>& public_keys);
  void choose_method(const ModelConfig& config);
  void find_state_sizes();
  void replay() const;

  exportkit_model handle_ = 0;
  const exportkit_description* about_ = nullptr;
  const exportkit_method_info* method_ = nullptr;
  std::vector<StateSize> state_sizes_;
};

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
