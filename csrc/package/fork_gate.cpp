#include "package/fork_gate.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>

namespace exportkit {
namespace {

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t working = 0;  // threads
  bool forking = false;
};

Gate& gate() {
  static auto& only = *new Gate;  // never destroyed: threads may outlive static objects
  return only;
}

// How deep this thread's work is nested: an operator may call a model, and Python may close one during its fork.
thread_local int64_t depth = 0;

}  // namespace

Work::Work() {
  if (depth++ > 0) return;
  std::unique_lock lock(gate().mutex);
  gate().changed.wait(lock, [] { return !gate().forking; });
  ++gate().working;
}

Work::~Work() {
  if (--depth > 0) return;
  const std::lock_guard lock(gate().mutex);
  --gate().working;
  if (gate().forking) gate().changed.notify_all();
}

void before_fork() {
  std::unique_lock lock(gate().mutex);
  gate().changed.wait(lock, [] { return !gate().forking; });
  gate().forking = true;
  gate().changed.wait(lock, [] { return gate().working == (depth > 0 ? 1 : 0); });
  ++depth;
}

void after_fork(bool child) {
  --depth;
  if (child) {
    new (&gate()) Gate;  // threads that do not exist here may have been waiting on it
    gate().working = depth > 0 ? 1 : 0;
    return;
  }
  const std::lock_guard lock(gate().mutex);
  gate().forking = false;
  gate().changed.notify_all();
}

}  // namespace exportkit
