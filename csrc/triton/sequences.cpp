#include "triton/sequences.h"

#include "triton/errors.h"

namespace exportkit::triton {

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
