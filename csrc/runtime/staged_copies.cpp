#include "runtime/staged_copies.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include "package/in_threads.h"
#include "runtime/cuda_driver.h"

namespace exportkit {
namespace {

struct CopyDriver {
  static constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: it does not wait for the default stream

  DriverFunction<int(void* memory, size_t bytes, unsigned flags)> pin{"cuMemHostRegister_v2"};
  DriverFunction<int(void* memory)> unpin{"cuMemHostUnregister"};
  DriverFunction<int(void** stream, unsigned flags)> make_stream{"cuStreamCreate"};
  DriverFunction<int(void* stream)> destroy_stream{"cuStreamDestroy_v2"};
  DriverFunction<int(void* stream)> wait{"cuStreamSynchronize"};
  DriverFunction<int(uint64_t to, const void* from, size_t bytes, void* stream)> copy{"cuMemcpyHtoDAsync_v2"};

  static const CopyDriver& get() {
    static const CopyDriver found{};
    return found;
  }
};

// Pinned memory, of huge pages where the system has them: they take a fourth of the time to pin.
class PinnedBlock {
 public:
  PinnedBlock(const CopyDriver& driver, size_t bytes) : driver_(driver), size_(bytes + kHugePage) {
    void* const made = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(made != MAP_FAILED, "the system refuses memory to pin");
    mapped_ = made;
    const auto address = reinterpret_cast<uintptr_t>(made);
    memory_ = static_cast<char*>(made) + ((address + kHugePage - 1) / kHugePage * kHugePage - address);
    madvise(mapped_, size_, MADV_HUGEPAGE);
    madvise(mapped_, size_, MADV_DONTFORK);  // a process that forks may get other pages than the pinned ones
    if (driver.pin(memory_, bytes, 0) == 0) return;
    munmap(mapped_, size_);
    TORCH_CHECK(false, "the driver refuses pinned memory");
  }
  ~PinnedBlock() {
    driver_.unpin(memory_);
    munmap(mapped_, size_);
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  char* data() const { return memory_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  const CopyDriver& driver_;
  size_t size_;
  void* mapped_ = nullptr;
  char* memory_ = nullptr;
};

// Pinned memory, and the stream that copies from it.
class Buffer {
 public:
  Buffer(const CopyDriver& driver, char* memory) : driver_(driver), memory_(memory) {
    TORCH_CHECK(driver.make_stream(&stream_, CopyDriver::kNonBlocking) == 0, "the driver refuses a stream");
  }
  ~Buffer() {
    driver_.wait(stream_);
    driver_.destroy_stream(stream_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // The memory, when its last copy has ended.
  char* idle() {
    TORCH_CHECK(driver_.wait(stream_) == 0, "a copy to the GPU failed");
    return memory_;
  }
  void send(char* to, size_t bytes) {
    TORCH_CHECK(driver_.copy(reinterpret_cast<uint64_t>(to), memory_, bytes, stream_) == 0,
                "the driver refuses a copy to the GPU");
  }

 private:
  const CopyDriver& driver_;
  char* memory_;
  void* stream_ = nullptr;
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
  if (blocks == 0) return true;
  lanes.count = std::min(lanes.count, processors());
  std::atomic<uint64_t> next{0};
  const auto copy = [&] {
    ensure_cuda_context(device);
    const CopyDriver& driver = CopyDriver::get();
    const PinnedBlock pinned(driver, 2 * lanes.count * size);
    in_threads(lanes.count, kWorthThreads, [&](size_t lane) {
      ensure_cuda_context(device);
      Buffer buffers[] = {{driver, pinned.data() + 2 * lane * size}, {driver, pinned.data() + (2 * lane + 1) * size}};
      size_t turn = 0;
      for (uint64_t block = next++; block < blocks; block = next++, turn = 1 - turn) {
        const uint64_t begin = block * size, end = std::min(bytes, begin + size);
        read_block(parts, read, begin, end, buffers[turn].idle());
        buffers[turn].send(to + begin, end - begin);
      }
      for (Buffer& buffer : buffers) buffer.idle();
    });
  };
  try {
    copy();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

}  // namespace exportkit
