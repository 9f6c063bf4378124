// Threads that run requests for an event loop, which goes on meanwhile and is told when they ended.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/requests.h"

namespace exportkit {

class Background {
 public:
  struct Ended {
    int64_t number;
    Answers answers;    // `wait_seconds` counts from `begin`
    std::string error;  // empty: it ran
  };

  explicit Background(int64_t threads);
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // A file descriptor of which something can be read while `ended` has something.
  int descriptor() const { return descriptor_; }
  // run_requests in one of the threads, those that began first first. The caller keeps the tensors: if a thread here
  // were the last to let go of one, it would wait for Python's lock.
  void begin(int64_t number, std::shared_ptr<const Code> code, std::vector<at::Tensor> tensors, int64_t requests,
             std::vector<int64_t> outputs);
  // Returns what ended since the last call.
  std::vector<Ended> ended();
  // Waits until every run has ended, and ends the threads. `ended` still returns those runs.
  void finish();

 private:
  struct Run;
  void work();

  int descriptor_;
  std::mutex mutex_;  // guards the next three
  std::condition_variable begun_;
  std::deque<Run> waiting_;
  std::vector<Ended> ended_;
  bool finishing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace exportkit
