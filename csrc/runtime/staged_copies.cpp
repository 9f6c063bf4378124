#include "runtime/staged_copies.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>

#include "package/in_threads.h"
#include "runtime/cuda_driver.h"

namespace exportkit {
namespace {

// Types and names as in cuda.h; 0 is success.
struct CopyDriver {
  static constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: it does not wait for the default stream

  int (*allocate)(void** memory, size_t bytes, unsigned flags);
  int (*free)(void* memory);
  int (*make_stream)(void** stream, unsigned flags);
  int (*destroy_stream)(void* stream);
  int (*wait)(void* stream);
  int (*copy)(uint64_t to, const void* from, size_t bytes, void* stream);

  static const CopyDriver& get() {
    static const CopyDriver found = [] {
      CopyDriver made{};
      find_in_driver("cuMemHostAlloc", made.allocate);
      find_in_driver("cuMemFreeHost", made.free);
      find_in_driver("cuStreamCreate", made.make_stream);
      find_in_driver("cuStreamDestroy_v2", made.destroy_stream);
      find_in_driver("cuStreamSynchronize", made.wait);
      find_in_driver("cuMemcpyHtoDAsync_v2", made.copy);
      return made;
    }();
    return found;
  }
};

// A pinned buffer, and the stream that copies from it.
class Buffer {
 public:
  Buffer(const CopyDriver& driver, size_t bytes) : driver_(driver) {
    TORCH_CHECK(driver.make_stream(&stream_, CopyDriver::kNonBlocking) == 0, "the driver refuses a stream");
    if (driver.allocate(&memory_, bytes, 0) == 0) return;
    driver.destroy_stream(stream_);
    TORCH_CHECK(false, "the driver refuses pinned memory");
  }
  ~Buffer() {
    driver_.wait(stream_);
    driver_.free(memory_);
    driver_.destroy_stream(stream_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // The memory, when its last copy has ended.
  char* idle() {
    TORCH_CHECK(driver_.wait(stream_) == 0, "a copy to the GPU failed");
    return static_cast<char*>(memory_);
  }
  void send(char* to, size_t bytes) {
    TORCH_CHECK(driver_.copy(reinterpret_cast<uint64_t>(to), memory_, bytes, stream_) == 0,
                "the driver refuses a copy to the GPU");
  }

 private:
  const CopyDriver& driver_;
  void* stream_ = nullptr;
  void* memory_ = nullptr;
};

// Reads the bytes of the GPU's memory from `begin` to `end`.
void read_block(const std::vector<StagedPart>& parts, const ReadPart& read, uint64_t begin, uint64_t end, char* to) {
  const auto is_before = [begin](const StagedPart& part) { return part.place + part.bytes <= begin; };
  auto part = std::partition_point(parts.begin(), parts.end(), is_before);
  for (; part != parts.end() && part->place < end; ++part) {
    const uint64_t first = std::max(begin, part->place), last = std::min(end, part->place + part->bytes);
    if (first < last) read(part->from + (first - part->place), to + (first - begin), last - first);
  }
}

}  // namespace

bool copy_staged(int device, char* to, const std::vector<StagedPart>& parts, const ReadPart& read, Lanes lanes) {
  const uint64_t bytes = parts.empty() ? 0 : parts.back().place + parts.back().bytes;
  const uint64_t size = lanes.buffer_bytes, blocks = (bytes + size - 1) / size;
  std::atomic<uint64_t> next{0};
  const auto lane = [&](size_t) {
    std::array<std::optional<Buffer>, 2> buffers;
    size_t turn = 0;
    for (uint64_t block = next++; block < blocks; block = next++, turn = 1 - turn) {
      std::optional<Buffer>& buffer = buffers[turn];
      if (!buffer) {
        ensure_cuda_context(device);
        buffer.emplace(CopyDriver::get(), size);
      }
      const uint64_t begin = block * size, end = std::min(bytes, begin + size);
      read_block(parts, read, begin, end, buffer->idle());
      buffer->send(to + begin, end - begin);
    }
    for (std::optional<Buffer>& buffer : buffers) {
      if (buffer) buffer->idle();
    }
  };
  try {
    in_threads(lanes.count, kWorthThreads, lane);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

}  // namespace exportkit
