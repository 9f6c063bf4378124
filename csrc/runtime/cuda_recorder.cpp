// Records CUDA streams into CUDA graphs. Functions of the driver are found at run time, and those of torch's CUDA part
// are weak, so that one build of this library works with and without CUDA.
#include "runtime/recorder.h"

#ifdef EXPORTKIT_CUDA_GRAPHS
#pragma weak _ZN3c104cuda20CUDACachingAllocator9allocatorE
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/cuda_driver.h"
#include "runtime/cuda_graph_driver.h"

namespace at::cuda {
__attribute__((weak)) c10::MempoolId_t graph_pool_handle();
}
#pragma weak cudaGetLastError

namespace exportkit {
namespace {

c10::cuda::CUDACachingAllocator::CUDAAllocator& allocator() { return *c10::cuda::CUDACachingAllocator::get(); }

// The memory of recordings. torch takes a pool for ended when nobody holds it any more, so it is held from the beginning.
struct Pool {
  explicit Pool(c10::DeviceIndex index) : device(index) { allocator().createOrIncrefPool(device, id); }
  ~Pool() { allocator().releasePool(device, id); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const c10::DeviceIndex device;
  const c10::MempoolId_t id = at::cuda::graph_pool_handle();
};

class CudaRecording final : public Recording {
 public:
  CudaRecording(std::shared_ptr<const Pool> pool, const GraphDriver& driver, void* graph)
      : pool_(std::move(pool)), driver_(driver) {
    driver.check(driver.instantiate(&launchable_, graph, 0), "the recorded work cannot be made a CUDA graph");
  }
  ~CudaRecording() override { driver_.destroy_launchable(launchable_); }
  CudaRecording(const CudaRecording&) = delete;
  CudaRecording& operator=(const CudaRecording&) = delete;

  void launch(c10::Stream stream) override {
    driver_.check(driver_.launch(launchable_, stream.native_handle()), "the CUDA graph cannot be launched");
  }

 private:
  const std::shared_ptr<const Pool> pool_;
  const GraphDriver& driver_;
  void* launchable_ = nullptr;
};

// What is recorded between construction and `end`. Allocations on the stream meanwhile come from the pool.
class Capture {
 public:
  Capture(std::shared_ptr<const Pool> pool, const GraphDriver& driver, void* stream)
      : pool_(std::move(pool)), driver_(driver), stream_(stream) {
    const auto is_ours = [this](cudaStream_t other) { return capture_ != 0 && driver_.capture_of(other) == capture_; };
    allocator().beginAllocateToPool(pool_->device, pool_->id, is_ours);
    const int failed = driver.begin(stream, GraphDriver::kThreadLocal);
    if (failed != 0) leave();
    driver.check(failed, "the stream cannot be recorded");
    capture_ = driver.capture_of(stream);
  }
  ~Capture() {
    if (capture_ == 0) return;
    void* graph = nullptr;
    driver_.end(stream_, &graph);
    if (graph != nullptr) driver_.destroy(graph);
    leave();
    cudaGetLastError();  // forgets the error of what could not be recorded, which the next kernel would report
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  std::unique_ptr<Recording> end() {
    void* graph = nullptr;
    const int failed = driver_.end(stream_, &graph);
    capture_ = 0;
    leave();
    driver_.check(failed, "a call does what a CUDA graph cannot repeat, such as waiting for the GPU");
    const std::unique_ptr<void, int (*)(void*)> owned(graph, driver_.destroy);
    driver_.check_nodes(graph);
    return std::make_unique<CudaRecording>(pool_, driver_, graph);
  }

 private:
  void leave() {
    allocator().endAllocateToPool(pool_->device, pool_->id);
    allocator().releasePool(pool_->device, pool_->id);  // `beginAllocateToPool` holds it once more
  }

  const std::shared_ptr<const Pool> pool_;
  const GraphDriver& driver_;
  void* const stream_;
  std::atomic<unsigned long long> capture_ = 0;
};

// Recordings of a device take turns on one stream, in one thread at a time. cuBLAS takes 32 MB for each stream and
// thread that it meets, and keeps them.
class RecordingStream {
 public:
  static RecordingStream& of(c10::Device device) {
    static std::mutex mutex;
    static auto& streams = *new std::map<c10::DeviceIndex, RecordingStream>;  // in use until the process ends
    const std::lock_guard lock(mutex);
    return streams.try_emplace(device.index(), device).first->second;
  }

  explicit RecordingStream(c10::Device device) : stream_(made(device)) {}

  template <class Work>
  auto run(const Work& work) {
    const std::lock_guard lock(one_at_a_time_);
    return std::async(std::launch::async, [&] {
             const c10::StreamGuard guard(stream_);
             ensure_cuda_context(stream_.device_index());
             return work(stream_);
           })
        .get();
  }

 private:
  static c10::Stream made(c10::Device device) {
    const c10::DeviceGuard guard(device);
    ensure_cuda_context(device.index());
    void* stream = nullptr;
    const GraphDriver& driver = GraphDriver::get();
    driver.check(driver.make_stream(&stream, GraphDriver::kNonBlocking), "CUDA gives no stream");
    return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(stream));
  }

  std::mutex one_at_a_time_;
  c10::Stream stream_;
};

class CudaRecorder final : public Recorder {
 public:
  explicit CudaRecorder(c10::Device device) : device_(device), pool_(std::make_shared<const Pool>(device.index())) {}

  void acquire(c10::Stream stream) override {
    if (last_stream_ && *last_stream_ != stream) last_use_.block(stream);
  }
  void release(c10::Stream stream) override {
    last_use_.record(stream);
    last_stream_ = stream;
  }
  void wait_until_free() override {
    if (last_stream_) last_use_.synchronize();
  }

  bool is_recorded(c10::Stream stream) const override {
    return driver_.capture_of(stream.native_handle()) != 0;
  }

  std::unique_ptr<Recording> record(const std::function<void()>& prepare, const std::function<void()>& work) override {
    c10::Event given(device_.type());
    given.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return RecordingStream::of(device_).run([&](c10::Stream stream) {
      given.block(stream);
      prepare();
      stream.synchronize();
      Capture capture(pool_, driver_, stream.native_handle());
      work();
      return capture.end();
    });
  }

  int64_t memory() const override {
    int64_t bytes = 0;
    for (const auto& segment : allocator().snapshot(pool_->id).segments) bytes += segment.total_size;
    return bytes;
  }

 private:
  const c10::Device device_;
  const std::shared_ptr<const Pool> pool_;
  const GraphDriver& driver_ = GraphDriver::get();
  c10::Event last_use_{device_.type()};
  std::optional<c10::Stream> last_stream_;
};

}  // namespace

const char* why_no_cuda_recorder() {
  const bool with_cuda = &c10::cuda::CUDACachingAllocator::allocator != nullptr && at::cuda::graph_pool_handle != nullptr;
  return with_cuda ? nullptr : "this torch was built without CUDA";
}

std::unique_ptr<Recorder> cuda_recorder(c10::Device device) { return std::make_unique<CudaRecorder>(device); }

}  // namespace exportkit

#else

namespace exportkit {
const char* why_no_cuda_recorder() { return "the C++ runtime was built where CUDA's headers are not"; }
std::unique_ptr<Recorder> cuda_recorder(c10::Device) { return nullptr; }
}  // namespace exportkit

#endif
