// Ways to copy a file to a GPU: `python -m benchmarks.load_to_gpu --sweep` compiles and runs it. Prints a line of JSON
// for each: of three turns that follow one another, the milliseconds of the median. "staged" is the runtime's
// copy_staged, "driver" a copy of the mapped file, and "bus" what the bus carries.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "runtime/cuda_driver.h"
#include "runtime/staged_copies.h"

namespace {

using exportkit::Lanes;

constexpr size_t kMiB = size_t{1} << 20, kHuge = 2 * kMiB;

int file = -1;
char* memory = nullptr;  // of the GPU
void* context = nullptr;
int (*use_context)(void*);
int (*copy_now)(uint64_t, const void*, size_t);
int (*copy_later)(uint64_t, const void*, size_t, void*);
int (*synchronize)();
int (*pin)(void**, size_t, unsigned);
int (*unpin)(void*);
int (*register_memory)(void*, size_t, unsigned);
int (*unregister_memory)(void*);

void need(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void time(const char* way, size_t bytes, Lanes lanes, const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int turn = 0; turn < 3; ++turn) seconds.push_back(seconds_of(work));
  std::sort(seconds.begin(), seconds.end());
  std::printf("{\"way\": \"%s\", \"MB\": %.1f, \"lanes\": %zu, \"buffer_MB\": %.2f, \"ms\": %.2f, \"GB/s\": %.2f}\n",
              way, double(bytes) / 1e6, lanes.count, double(lanes.buffer_bytes) / (1 << 20), seconds[1] * 1e3,
              double(bytes) / seconds[1] / 1e9);
  std::fflush(stdout);
}

int pin_huge(void** found, size_t bytes) {
  const size_t size = (bytes + kHuge - 1) / kHuge * kHuge;
  void* made = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  need(made != MAP_FAILED, "mmap failed");
  const size_t before = (kHuge - reinterpret_cast<uintptr_t>(made) % kHuge) % kHuge;
  char* const aligned = static_cast<char*>(made) + before;
  if (before > 0) munmap(made, before);
  if (before < kHuge) munmap(aligned + size, kHuge - before);
  madvise(aligned, size, MADV_HUGEPAGE);
  *found = aligned;
  return register_memory(aligned, bytes, 0);
}

int unpin_huge(void* made, size_t bytes) {
  const int status = unregister_memory(made);
  munmap(made, (bytes + kHuge - 1) / kHuge * kHuge);
  return status;
}

char* mapped(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
  need(found != MAP_FAILED, "the file cannot be mapped");
  return static_cast<char*>(found);
}

// As torch copies a mapped tensor.
void driver_copies(size_t bytes) {
  char* from = mapped(bytes);
  need(copy_now(reinterpret_cast<uint64_t>(memory), from, bytes) == 0, "the driver refuses a copy");
  munmap(from, bytes);
}

void staged(size_t bytes, Lanes lanes) {
  const auto read = [](const char* at, char* to, size_t size) {
    for (size_t done = 0; done < size;) {
      const ssize_t count = pread(file, to + done, size - done, reinterpret_cast<off_t>(at) + off_t(done));
      need(count > 0, "the file cannot be read");
      done += size_t(count);
    }
  };
  need(exportkit::copy_staged(0, memory, {{nullptr, 0, bytes}}, read, lanes), "the driver refuses a staged copy");
}

// What the bus carries: the same pinned memory again and again.
void bus(size_t bytes, void* pinned, size_t pinned_bytes) {
  for (size_t begin = 0; begin < bytes; begin += pinned_bytes) {
    copy_later(reinterpret_cast<uint64_t>(memory) + begin, pinned, std::min(pinned_bytes, bytes - begin), nullptr);
  }
  need(synchronize() == 0, "the driver refuses a copy");
}

// So many buffers are pinned and freed by each of so many threads.
void pin_in_threads(size_t threads, size_t buffers, size_t bytes, bool huge) {
  std::vector<std::thread> started;
  for (size_t i = 0; i < threads; ++i) {
    started.emplace_back([=] {
      exportkit::ensure_cuda_context(0);
      std::vector<void*> made(buffers);
      for (void*& each : made) need((huge ? pin_huge(&each, bytes) : pin(&each, bytes, 0)) == 0, "nothing is pinned");
      for (void* each : made) need((huge ? unpin_huge(each, bytes) : unpin(each)) == 0, "pinned memory stays");
    });
  }
  for (std::thread& thread : started) thread.join();
}

template <class Function>
void find(const char* name, Function& function) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  need(driver != nullptr, "there is no CUDA driver");
  function = reinterpret_cast<Function>(dlsym(driver, name));
  need(function != nullptr, name);
}

}  // namespace

namespace exportkit {

void* driver_function(const char* name) {
  void* function = nullptr;
  find(name, function);
  return function;
}

void ensure_cuda_context(int) { need(use_context(context) == 0, "the driver refuses the context"); }

}  // namespace exportkit

int main(int, char** argv) {
  file = open(argv[1], O_RDONLY);
  struct stat status{};
  need(file >= 0 && fstat(file, &status) == 0, "the file cannot be opened");
  const auto size = static_cast<size_t>(status.st_size);
  int (*start)(unsigned), (*retain)(void**, int), (*allocate)(uint64_t*, size_t);
  find("cuInit", start);
  find("cuDevicePrimaryCtxRetain", retain);
  find("cuCtxSetCurrent", use_context);
  find("cuMemAlloc_v2", allocate);
  find("cuMemcpyHtoD_v2", copy_now);
  find("cuMemcpyHtoDAsync_v2", copy_later);
  find("cuCtxSynchronize", synchronize);
  find("cuMemHostAlloc", pin);
  find("cuMemFreeHost", unpin);
  find("cuMemHostRegister_v2", register_memory);
  find("cuMemHostUnregister", unregister_memory);
  need(start(0) == 0 && retain(&context, 0) == 0, "the driver finds no GPU");
  exportkit::ensure_cuda_context(0);
  uint64_t address = 0;
  need(allocate(&address, size) == 0, "the GPU has too little memory");
  memory = reinterpret_cast<char*>(address);

  void* pinned = nullptr;
  need(pin(&pinned, 256 * kMiB, 0) == 0, "the driver refuses pinned memory");
  time("bus", size, {1, 256 * kMiB}, [&] { bus(size, pinned, 256 * kMiB); });
  unpin(pinned);
  for (const bool huge : {false, true}) {
    for (const size_t threads : {1, 4, 16}) {  // 32 MiB
      for (const size_t bytes : {kHuge, 32 * kMiB / threads}) {
        const char* way = huge ? "pin, huge" : "pin";
        time(way, 32 * kMiB, {threads, bytes},
             [&] { pin_in_threads(threads, 32 * kMiB / threads / bytes, bytes, huge); });
        if (threads == 16) break;
      }
    }
  }
  for (const size_t bytes : {32 * kMiB, 64 * kMiB, 128 * kMiB, 512 * kMiB, size}) {
    if (bytes > size) break;
    time("driver", bytes, {0, 0}, [&] { driver_copies(bytes); });
    for (const Lanes lanes :
         {Lanes{4, kMiB}, Lanes{4, kHuge}, Lanes{8, kMiB}, Lanes{8, kHuge}, Lanes{12, kHuge}, Lanes{16, kHuge}}) {
      time("staged", bytes, lanes, [&] { staged(bytes, lanes); });
    }
  }
}
