#include "runtime/run/bench.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

namespace exportkit::run {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

void call(const Model& model, const std::vector<at::Tensor>& inputs) {
  const std::vector<at::Tensor> outputs = model.run(inputs);
  if (model.device().is_cpu()) return;
  const c10::impl::VirtualGuardImpl device(model.device().type());
  device.synchronizeStream(device.getStream(model.device()));
}

}  // namespace

Timing bench(const Model& model, const std::vector<at::Tensor>& inputs, double seconds, int64_t threads) {
  constexpr int kWarmUp = 5;
  for (int i = 0; i < kWarmUp; ++i) call(model, inputs);
  std::vector<std::vector<double>> times(static_cast<size_t>(threads));
  std::vector<std::exception_ptr> failures(times.size());
  std::vector<std::thread> workers;
  const auto start = Clock::now();
  const auto end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (size_t i = 0; i < times.size(); ++i) {
    workers.emplace_back([&, i] {
      try {
        for (auto now = Clock::now(); now < end || times[i].empty();) {
          call(model, inputs);
          const auto then = std::exchange(now, Clock::now());
          times[i].push_back(milliseconds(now - then));
        }
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  const double elapsed = milliseconds(Clock::now() - start);
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  std::vector<double> all;
  for (const auto& each : times) all.insert(all.end(), each.begin(), each.end());
  std::sort(all.begin(), all.end());
  const auto at = [&](double share) { return all[static_cast<size_t>(share * static_cast<double>(all.size() - 1))]; };
  return {all.size(), at(0.5), at(0.99), static_cast<double>(all.size()) / elapsed * 1e3};
}

}  // namespace exportkit::run
