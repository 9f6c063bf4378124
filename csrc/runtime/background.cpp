#include "runtime/background.h"

#include <c10/util/Exception.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "package/fork_gate.h"

namespace exportkit {

using Clock = std::chrono::steady_clock;

struct Background::Run {
  int64_t number;
  std::shared_ptr<const Code> code;
  std::vector<at::Tensor> tensors;
  int64_t requests;
  std::vector<int64_t> outputs;
  Clock::time_point begun;
};

Background::Background(int64_t threads) : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  TORCH_CHECK(descriptor_ >= 0, "the system refuses an event descriptor: ", std::strerror(errno));
  for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

Background::~Background() {
  finish();
  close(descriptor_);
}

void Background::begin(int64_t number, std::shared_ptr<const Code> code, std::vector<at::Tensor> tensors,
                       int64_t requests, std::vector<int64_t> outputs) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back({number, std::move(code), std::move(tensors), requests, std::move(outputs), Clock::now()});
  }
  begun_.notify_one();
}

std::vector<Background::Ended> Background::ended() {
  std::vector<Ended> ended;
  const std::lock_guard lock(mutex_);
  eventfd_t count;
  eventfd_read(descriptor_, &count);
  ended.swap(ended_);
  return ended;
}

void Background::finish() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void Background::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    begun_.wait(lock, [this] { return finishing_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Run run = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    Ended ended{run.number, {}, {}};
    const auto waited = std::chrono::duration<double>(Clock::now() - run.begun).count();
    try {
      const Work work;
      ended.answers = run_requests(*run.code, run.tensors, run.requests, run.outputs);
      ended.answers.wait_seconds += waited;
    } catch (const c10::Error& error) {
      ended.error = error.what_without_backtrace();
    } catch (const std::exception& error) {
      ended.error = error.what();
    } catch (...) {
      ended.error = "an error without a message";
    }
    run.tensors.clear();
    lock.lock();
    ended_.push_back(std::move(ended));
    eventfd_write(descriptor_, 1);
  }
}

}  // namespace exportkit
