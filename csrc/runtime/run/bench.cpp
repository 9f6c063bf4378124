#include "runtime/run/bench.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

namespace exportkit::run {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

// Inputs for one call: what it writes belongs to this thread.
std::vector<at::Tensor> own_inputs(const TimedCall& call) {
  std::vector<at::Tensor> inputs = call.inputs;
  const std::vector<TensorInfo>& described = call.model.method(call.method).inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (described[i].written) inputs[i] = inputs[i].clone();
  }
  return inputs;
}

// Runs the call once and returns its time in milliseconds.
double time_once(const TimedCall& call, std::mutex& forking) {
  std::optional<Session> session;
  if (call.session) {
    const std::lock_guard one_at_a_time(forking);
    session = call.session->fork();
  }
  const std::vector<at::Tensor> inputs = own_inputs(call);
  if (session) call.model.synchronize();
  const auto start = Clock::now();
  const std::vector<at::Tensor> outputs =
      session ? session->run(call.method, inputs) : call.model.run(call.method, inputs);
  call.model.synchronize();
  return milliseconds(Clock::now() - start);
}

}  // namespace

Timing bench(const TimedCall& call, double seconds, int64_t threads) {
  constexpr int kWarmUp = 5;
  std::mutex forking;
  for (int i = 0; i < kWarmUp; ++i) time_once(call, forking);
  std::vector<std::vector<double>> times(static_cast<size_t>(threads));
  std::vector<std::exception_ptr> failures(times.size());
  std::vector<std::thread> workers;
  const auto start = Clock::now();
  const auto end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (size_t i = 0; i < times.size(); ++i) {
    workers.emplace_back([&, i] {
      try {
        while (Clock::now() < end || times[i].empty()) times[i].push_back(time_once(call, forking));
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  std::vector<double> all;
  double calls_per_second = 0;  // of all threads, without the time between calls
  for (const auto& each : times) {
    all.insert(all.end(), each.begin(), each.end());
    const double spent = std::accumulate(each.begin(), each.end(), 0.0);
    calls_per_second += static_cast<double>(each.size()) / spent * 1e3;
  }
  std::sort(all.begin(), all.end());
  const auto at = [&](double share) { return all[static_cast<size_t>(share * static_cast<double>(all.size() - 1))]; };
  return {all.size(), at(0.5), at(0.99), calls_per_second};
}

}  // namespace exportkit::run
