// Ways to copy a file to a GPU: `python -m benchmarks.load_to_gpu --sweep` compiles and runs it. Prints a line of JSON
// for each: of three turns that follow one another, the seconds of the median. The file is mapped anew for each turn,
// as a process does that loads it.
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
#include <vector>

#include "runtime/cuda_driver.h"
#include "runtime/staged_copies.h"

namespace {

using exportkit::Lanes;

int file = -1;
char* memory = nullptr;  // of the GPU
int (*copy_now)(uint64_t, const void*, size_t);
int (*copy_later)(uint64_t, const void*, size_t, void*);
int (*synchronize)();
int (*pin)(void**, size_t, unsigned);
int (*unpin)(void*);

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

void staged_from_mapping(size_t bytes, Lanes lanes) {
  char* from = mapped(bytes);
  const auto read = [](const char* at, char* to, size_t size) { std::memcpy(to, at, size); };
  need(exportkit::copy_staged(0, memory, {{from, 0, bytes}}, read, lanes), "the driver refuses a staged copy");
  munmap(from, bytes);
}

void staged_from_file(size_t bytes, Lanes lanes) {
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

}  // namespace

int main(int, char** argv) {
  file = open(argv[1], O_RDONLY);
  struct stat status{};
  need(file >= 0 && fstat(file, &status) == 0, "the file cannot be opened");
  const auto size = static_cast<size_t>(status.st_size);
  int (*start)(unsigned), (*retain)(void**, int);
  exportkit::find_in_driver("cuInit", start);
  exportkit::find_in_driver("cuDevicePrimaryCtxRetain", retain);
  void* context = nullptr;
  need(start(0) == 0 && retain(&context, 0) == 0,
       "there is no GPU");  // in a package's process, torch holds the context
  exportkit::ensure_cuda_context(0);
  int (*allocate)(uint64_t*, size_t);
  exportkit::find_in_driver("cuMemAlloc_v2", allocate);
  exportkit::find_in_driver("cuMemcpyHtoD_v2", copy_now);
  exportkit::find_in_driver("cuMemcpyHtoDAsync_v2", copy_later);
  exportkit::find_in_driver("cuCtxSynchronize", synchronize);
  exportkit::find_in_driver("cuMemHostAlloc", pin);
  exportkit::find_in_driver("cuMemFreeHost", unpin);
  uint64_t address = 0;
  need(allocate(&address, size) == 0, "the GPU has too little memory");
  memory = reinterpret_cast<char*>(address);

  constexpr size_t kMiB = size_t{1} << 20;
  void* pinned = nullptr;
  need(pin(&pinned, 256 * kMiB, 0) == 0, "there is no pinned memory");
  time("bus", size, {1, 256 * kMiB}, [&] { bus(size, pinned, 256 * kMiB); });
  unpin(pinned);
  for (const size_t bytes : {8 * kMiB, 32 * kMiB, 128 * kMiB}) {
    time("pin and free", bytes, {1, bytes}, [&] {
      void* held = nullptr;
      need(pin(&held, bytes, 0) == 0 && unpin(held) == 0, "there is no pinned memory");
    });
  }
  time("driver", size, {0, 0}, [&] { driver_copies(size); });
  for (const size_t count : {1, 2, 4, 6, 8, 12, 16}) {
    for (const size_t buffer : {kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB}) {
      const Lanes lanes{count, buffer};
      time("staged, read", size, lanes, [&] { staged_from_file(size, lanes); });
      if (buffer == 4 * kMiB) time("staged, mapped", size, lanes, [&] { staged_from_mapping(size, lanes); });
    }
  }
  for (const size_t bytes : {4, 8, 16, 32, 64, 128, 256}) {
    if (bytes * kMiB > size) break;
    time("driver", bytes * kMiB, {0, 0}, [&] { driver_copies(bytes * kMiB); });
    for (const Lanes lanes : {Lanes{4, kMiB}, Lanes{8, kMiB}, Lanes{4, 4 * kMiB}, Lanes{8, 4 * kMiB}}) {
      time("staged, read", bytes * kMiB, lanes, [&] { staged_from_file(bytes * kMiB, lanes); });
    }
  }
}
