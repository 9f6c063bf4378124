// The sessions of a model's sequences.
#pragma once

#include <exportkit/exportkit.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
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

}  // namespace exportkit::triton
