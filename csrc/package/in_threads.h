// Work on large records, several at once.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace exportkit {

constexpr uint64_t kWorthThreads = 64 << 20;  // bytes to hash
constexpr size_t kMostThreads = 16;

// How many threads may run at once: fewer than the machine has processors in a container.
inline size_t processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<size_t>(CPU_COUNT(&set)) : 1;
}

// Calls work(i) for each i below count, in several threads if there are many bytes. Throws what the first i threw that
// threw; those after it may then be left out.
template <class Work>
void in_threads(size_t count, uint64_t bytes, const Work& work) {
  std::vector<std::exception_ptr> failures(count);
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto take = [&] {
    for (size_t i = next++; i < count && !failed; i = next++) {
      try {
        work(i);
      } catch (...) {
        failures[i] = std::current_exception();
        failed = true;
      }
    }
  };
  std::vector<std::thread> threads;
  const size_t wanted = bytes < kWorthThreads ? 1 : std::min({count, processors(), kMostThreads});
  try {
    while (threads.size() + 1 < wanted) threads.emplace_back(take);
  } catch (const std::system_error&) {  // no more threads are allowed: those that there are do the work
  }
  take();
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace exportkit
