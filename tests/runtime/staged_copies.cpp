// csrc/runtime/staged_copies.cpp over a driver whose GPU is ordinary memory. It copies as late as it may: when somebody
// waits for the stream. Tries random weights from the seeds `argv[1]` to `argv[2]`, prints what is wrong, and ends with
// 1 if anything is.
#include "runtime/staged_copies.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "runtime/cuda_driver.h"

namespace {

using exportkit::StagedPart;
using Bytes = std::vector<char>;

struct Stream {
  std::vector<std::function<void()>> due;
};

std::mutex mutex;
std::set<void*> pinned;
std::set<Stream*> streams;
std::set<std::thread::id> ready;  // threads with a context
std::atomic<int> until_failure;   // calls of the driver; below 0 none fails
std::string wrong;

void need(bool right, const char* what) {
  if (!right) wrong = what;
}

bool fails() { return until_failure-- == 0; }

int pin(void* memory, size_t, unsigned) {
  if (fails()) return 2;
  const std::lock_guard lock(mutex);
  need(ready.contains(std::this_thread::get_id()), "a thread pins without a context");
  pinned.insert(memory);
  return 0;
}

int unpin(void* memory) {
  const std::lock_guard lock(mutex);
  need(streams.empty(), "memory is not pinned any more while a stream may copy from it");
  need(pinned.erase(memory) == 1, "memory was not pinned");
  return 0;
}

int make_stream(void** stream, unsigned) {
  if (fails()) return 2;
  const std::lock_guard lock(mutex);
  need(ready.contains(std::this_thread::get_id()), "a thread makes a stream without a context");
  *stream = *streams.insert(new Stream).first;
  return 0;
}

int destroy_stream(void* stream) {
  const std::lock_guard lock(mutex);
  auto* found = static_cast<Stream*>(stream);
  need(streams.erase(found) == 1 && found->due.empty(), "a stream goes before its copies");
  delete found;
  return 0;
}

int wait(void* stream) {
  auto& due = static_cast<Stream*>(stream)->due;
  if (due.empty()) return 0;
  for (const auto& copy : due) copy();
  due.clear();
  return fails() ? 2 : 0;
}

int copy(uint64_t to, const void* from, size_t bytes, void* stream) {
  if (fails()) return 2;
  static_cast<Stream*>(stream)->due.emplace_back([=] { std::memcpy(reinterpret_cast<char*>(to), from, bytes); });
  return 0;
}

size_t below(std::mt19937& random, size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(random); }

void run(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Bytes> sources(below(random, 12));
  std::vector<StagedPart> parts;
  uint64_t end = 0;
  for (Bytes& source : sources) {
    source.resize(below(random, 4) == 0 ? 0 : below(random, 3000));
    for (char& byte : source) byte = static_cast<char>(random());
    parts.push_back({source.data(), end, source.size()});
    end += (source.size() + 511) / 512 * 512;
  }
  Bytes memory(end);
  const exportkit::Lanes lanes = {1 + below(random, 4), 1 + below(random, 1500)};
  const bool driver_fails = below(random, 3) == 0, reading_fails = !driver_fails && below(random, 4) == 0;
  until_failure = driver_fails ? static_cast<int>(below(random, 20)) : -1;
  std::atomic<int> reads = reading_fails ? static_cast<int>(below(random, 10)) : -1;
  const auto read = [&](const char* from, char* to, size_t bytes) {
    if (reads-- == 0) throw std::runtime_error("it became shorter");
    std::memcpy(to, from, bytes);
  };
  ready.clear();
  bool copied = false, threw = false;
  try {
    copied = exportkit::copy_staged(0, memory.data(), parts, read, lanes);
  } catch (const std::runtime_error&) {
    threw = true;
  }
  need(copied || threw || driver_fails, "it refuses without a reason");
  need(!threw || reading_fails, "it throws without a reason");
  need(!copied || !driver_fails || until_failure >= 0, "it hides the driver's refusal");
  need(!copied || !reading_fails || reads >= 0, "it hides what could not be read");
  for (const StagedPart& part : parts) {
    const bool same = part.bytes == 0 || std::memcmp(&memory[part.place], part.from, part.bytes) == 0;
    need(!copied || same, "a part is not what it was");
  }
  need(pinned.empty() && streams.empty(), "pinned memory or a stream stays");
}

}  // namespace

namespace exportkit {

void* driver_function(const char* name) {
  const std::string_view wanted = name;
  if (wanted == "cuMemHostRegister_v2") return reinterpret_cast<void*>(pin);
  if (wanted == "cuMemHostUnregister") return reinterpret_cast<void*>(unpin);
  if (wanted == "cuStreamCreate") return reinterpret_cast<void*>(make_stream);
  if (wanted == "cuStreamDestroy_v2") return reinterpret_cast<void*>(destroy_stream);
  if (wanted == "cuStreamSynchronize") return reinterpret_cast<void*>(wait);
  return wanted == "cuMemcpyHtoDAsync_v2" ? reinterpret_cast<void*>(copy) : nullptr;
}

void ensure_cuda_context(int) {
  const std::lock_guard lock(mutex);
  ready.insert(std::this_thread::get_id());
}

}  // namespace exportkit

int main(int, char** argv) {
  for (unsigned seed = std::stoul(argv[1]); seed < std::stoul(argv[2]); ++seed) {
    run(seed);
    if (wrong.empty()) continue;
    std::cout << "seed " << seed << ": " << wrong << "\n";
    return 1;
  }
}
