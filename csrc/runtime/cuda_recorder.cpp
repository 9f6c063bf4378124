// Records CUDA streams as CUDA graphs. This library also works without CUDA: it looks up the driver's functions when it
// runs, and it declares torch's CUDA functions weak.
#include "runtime/recorder.h"

#ifdef EXPORTKIT_CUDA_GRAPHS
#pragma weak _ZN3c104cuda20CUDACachingAllocator9allocatorE
#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/cuda_driver.h"
#include "runtime/cuda_nodes.h"
#include "runtime/streams.h"

namespace at::cuda {
__attribute__((weak)) c10::MempoolId_t graph_pool_handle();
}
#pragma weak cudaGetLastError

namespace exportkit {
namespace {

c10::cuda::CUDACachingAllocator::CUDAAllocator& allocator() { return *c10::cuda::CUDACachingAllocator::get(); }

constexpr const char* kNotRepeatable = "a call does what a CUDA graph cannot repeat, such as waiting for the GPU";

// The memory of recordings. torch takes a pool for ended when nobody holds it any more, so it is held from the
// beginning.
struct Pool {
  explicit Pool(c10::DeviceIndex index) : device(index) { allocator().createOrIncrefPool(device, id); }
  ~Pool() { allocator().releasePool(device, id); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const c10::DeviceIndex device;
  const c10::MempoolId_t id = at::cuda::graph_pool_handle();
};

using Graph = std::unique_ptr<void, int (*)(void*)>;

// Which arguments a graph copies. The others are used where they are.
struct Copied {
  std::vector<size_t> arguments;
  CudaCopies in;
  std::vector<size_t> written;  // of `arguments`. Their way back is part of the outputs' copies, behind the outputs
};

// An output that is an argument, or a part of one.
struct OutputInArgument {
  size_t output, argument;
  uint64_t offset;
};

class CudaRecording final : public Recording {
 public:
  // The copies are nodes of `graph`.
  CudaRecording(std::shared_ptr<const Pool> pool, const GraphDriver& driver, Graph graph, CudaUses uses,
                std::optional<Copied> copied, CudaCopies outputs, std::vector<OutputInArgument> outputs_in_arguments)
      : pool_(std::move(pool)),
        driver_(driver),
        graph_(std::move(graph)),
        uses_(std::move(uses)),
        copied_(std::move(copied)),
        outputs_(std::move(outputs)),
        outputs_in_arguments_(std::move(outputs_in_arguments)) {
    driver.check(driver.instantiate(&launchable_, graph_.get(), 0), "the recorded work cannot be made a CUDA graph");
  }
  ~CudaRecording() override { driver_.destroy_launchable(launchable_); }

  void launch(c10::Stream stream, const std::vector<void*>& arguments, const std::vector<void*>& outputs) override {
    uses_.move(launchable_, arguments);
    for (size_t i = 0; i < outputs.size(); ++i) outputs_.write(i, outputs[i]);
    for (const OutputInArgument& use : outputs_in_arguments_) {
      if (moves(use.argument)) outputs_.read(use.output, static_cast<char*>(arguments[use.argument]) + use.offset);
    }
    if (copied_) {
      for (size_t i = 0; i < copied_->arguments.size(); ++i) copied_->in.read(i, arguments[copied_->arguments[i]]);
      for (size_t i = 0; i < copied_->written.size(); ++i) {
        outputs_.write(outputs.size() + i, arguments[copied_->written[i]]);
      }
      copied_->in.update(launchable_);
    }
    outputs_.update(launchable_);
    driver_.check(driver_.launch(launchable_, stream.native_handle()), "the CUDA graph cannot be launched");
  }

  bool moves(size_t argument) const override {
    return !copied_ || !std::binary_search(copied_->arguments.begin(), copied_->arguments.end(), argument);
  }

 private:
  const std::shared_ptr<const Pool> pool_;
  const GraphDriver& driver_;
  const Graph graph_;  // kept because the driver changes a launchable's node by the handle of the graph's node
  CudaUses uses_;
  std::optional<Copied> copied_;
  CudaCopies outputs_;
  const std::vector<OutputInArgument> outputs_in_arguments_;
  void* launchable_ = nullptr;
};

// Makes torch allocate from a pool, until it ends, on the streams for which `is_ours` returns true.
class Pooled {
 public:
  Pooled(const Pool& pool, std::function<bool(cudaStream_t)> is_ours) : pool_(&pool) {
    allocator().beginAllocateToPool(pool.device, pool.id, std::move(is_ours));
  }
  ~Pooled() { end(); }
  Pooled(const Pooled&) = delete;
  Pooled& operator=(const Pooled&) = delete;

  void end() {
    if (pool_ == nullptr) return;
    allocator().endAllocateToPool(pool_->device, pool_->id);
    allocator().releasePool(pool_->device, pool_->id);  // `beginAllocateToPool` holds it once more
    pool_ = nullptr;
  }

 private:
  const Pool* pool_;
};

// What is recorded between construction and `end`. Allocations on the stream meanwhile come from the pool.
class Capture {
 public:
  Capture(const Pool& pool, const GraphDriver& driver, void* stream)
      : driver_(driver),
        stream_(stream),
        pooled_(pool, [this](cudaStream_t other) { return capture_ != 0 && driver_.capture_of(other) == capture_; }) {
    driver.check(driver.begin(stream, GraphDriver::kThreadLocal), "the stream cannot be recorded");
    capture_ = driver.capture_of(stream);
  }
  ~Capture() {
    if (capture_ == 0) return;
    void* graph = nullptr;
    driver_.end(stream_, &graph);
    if (graph != nullptr) driver_.destroy(graph);
    forget_error();
  }

  Graph end() {
    void* graph = nullptr;
    const int failed = driver_.end(stream_, &graph);
    capture_ = 0;
    pooled_.end();
    if (failed != 0) forget_error();
    driver_.check(failed, kNotRepeatable);
    return Graph(graph, driver_.destroy);
  }

 private:
  // That of what could not be recorded: the next kernel would report it.
  static void forget_error() { cudaGetLastError(); }

  const GraphDriver& driver_;
  void* const stream_;
  std::atomic<uint64_t> capture_ = 0;
  Pooled pooled_;
};

// A stream for the recordings of one recorder. All recordings take turns, each in a thread of its own.
//
// torch gives cuBLAS up to 32 MB for each thread on each stream, and a graph's kernels go on writing there. So graphs
// that run at the same time must come from different streams. A stream is used again when its recorder has ended,
// because torch keeps the memory. torch.compile frees it for each graph of its own. It then goes back to the stream's
// pool, and nothing else is allocated from there.
class RecordingStream {
 public:
  static std::shared_ptr<RecordingStream> lease(c10::Device device) {
    static std::mutex mutex;
    static auto& unused = *new std::multimap<c10::DeviceIndex, RecordingStream*>;  // in use until the process ends
    const std::lock_guard lock(mutex);
    const auto found = unused.find(device.index());
    RecordingStream* stream = found != unused.end() ? found->second : new RecordingStream(device);
    if (found != unused.end()) unused.erase(found);
    return {stream, [](RecordingStream* ended) {
              const std::lock_guard lock(mutex);
              unused.emplace(ended->pool_.device, ended);
            }};
  }

  template <class Work>
  auto run(const Work& work) {
    const std::lock_guard lock(one_at_a_time_);
    return std::async(std::launch::async,
                      [&] {
                        const c10::StreamGuard guard(stream_);
                        ensure_cuda_context(stream_.device_index());
                        give_cublas_memory();
                        return work(stream_);
                      })
        .get();
  }

 private:
  explicit RecordingStream(c10::Device device) : stream_(made(device)), pool_(device.index()) {}

  static c10::Stream made(c10::Device device) {
    const c10::DeviceGuard guard(device);
    ensure_cuda_context(device.index());
    void* stream = nullptr;
    const GraphDriver& driver = GraphDriver::get();
    driver.check(driver.make_stream(&stream, GraphDriver::kNonBlocking), "CUDA cannot make a stream");
    return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(stream));
  }

  // A first product of each kind makes torch give memory to cuBLAS and to cublasLt.
  void give_cublas_memory() const {
    const Pooled pooled(pool_, [this](cudaStream_t other) { return other == stream_.native_handle(); });
    const at::Tensor matrix = at::zeros({16, 16}, at::device(stream_.device()));
    try {
      at::addmm(at::zeros({16}, matrix.options()), at::mm(matrix, matrix), matrix);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error&) {  // torch's deterministic mode may refuse products. Then it refuses a model's, too.
    }
  }

  static inline std::mutex one_at_a_time_;
  const c10::Stream stream_;
  const Pool pool_;
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

  bool is_recorded(c10::Stream stream) const override { return driver_.capture_of(stream.native_handle()) != 0; }

  std::unique_ptr<Recording> record(const std::vector<Span>& arguments, const std::vector<size_t>& written,
                                    Arguments how, const Prepare& prepare, const Work& work) override {
    c10::Event given(device_.type());
    given.record(current_stream(device_));
    return stream_->run([&](c10::Stream stream) {
      given.block(stream);
      if (last_stream_) last_use_.block(stream);  // a recording and `prepare` share cuBLAS' memory
      prepare();
      stream.synchronize();
      void* const handle = stream.native_handle();
      std::vector<bool> moved(arguments.size(), how == Arguments::kMoved);
      auto recording = recorded(handle, arguments, written, moved, work);
      if (!recording) recording = recorded(handle, arguments, written, moved, work);
      TORCH_CHECK(recording, "two recordings use different arguments");
      return recording;
    });
  }

  int64_t memory() const override {
    int64_t bytes = 0;
    for (const auto& segment : allocator().snapshot(pool_->id).segments) bytes += segment.total_size;
    return bytes;
  }

 private:
  // Null if no use of an argument that shall be moved is found. `moved` then says so, for another recording.
  std::unique_ptr<Recording> recorded(void* stream, const std::vector<Span>& arguments,
                                      const std::vector<size_t>& written, std::vector<bool>& moved, const Work& work) {
    Capture capture(*pool_, driver_, stream);
    std::vector<size_t> copied;
    std::vector<Span> copied_spans, searched = arguments;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (moved[i] || arguments[i].bytes == 0) continue;
      copied.push_back(i);
      copied_spans.push_back(arguments[i]);
      searched[i].bytes = 0;
    }
    std::optional<Copied> copies;
    if (!copied.empty()) {
      copies.emplace(Copied{copied, CudaCopies(driver_, device_, stream, to_themselves(copied_spans)), {}});
    }
    std::vector<Span> outputs;
    try {
      outputs = work();
    } catch (const std::exception&) {  // torch says only where its loader called the code
      TORCH_CHECK(false, kNotRepeatable);
    }
    std::vector<OutputInArgument> outputs_in_arguments = found_in(outputs, arguments);
    for (size_t i : written) {
      if (!std::binary_search(copied.begin(), copied.end(), i)) continue;
      copies->written.push_back(i);
      outputs.push_back(arguments[i]);
    }
    CudaCopies out(driver_, device_, stream, to_themselves(outputs));
    Graph graph = capture.end();
    driver_.check_nodes(graph.get());
    CudaUses uses(driver_, graph.get(), searched);
    bool found = true;
    for (size_t i = 0; i < searched.size(); ++i) {
      if (uses.finds(i)) continue;
      found = moved[i] = false;
    }
    if (!found) return nullptr;
    return std::make_unique<CudaRecording>(pool_, driver_, std::move(graph), std::move(uses), std::move(copies),
                                           std::move(out), std::move(outputs_in_arguments));
  }

  // Copies of spans to their own place; one end is set at each launch.
  static std::vector<CudaCopies::Copy> to_themselves(const std::vector<Span>& spans) {
    std::vector<CudaCopies::Copy> made;
    for (const Span& span : spans) made.push_back({span.address, span.address, span.bytes});
    return made;
  }

  static std::vector<OutputInArgument> found_in(const std::vector<Span>& outputs, const std::vector<Span>& arguments) {
    std::vector<OutputInArgument> found;
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (size_t a = 0; a < arguments.size() && outputs[o].bytes > 0; ++a) {
        const auto offset =
            reinterpret_cast<uint64_t>(outputs[o].address) - reinterpret_cast<uint64_t>(arguments[a].address);
        if (offset < arguments[a].bytes) found.push_back({o, a, offset});
      }
    }
    return found;
  }

  const c10::Device device_;
  const std::shared_ptr<const Pool> pool_;
  const std::shared_ptr<RecordingStream> stream_ = RecordingStream::lease(device_);
  const GraphDriver& driver_ = GraphDriver::get();
  c10::Event last_use_{device_.type()};
  std::optional<c10::Stream> last_stream_;
};

}  // namespace

const char* why_no_cuda_recorder() {
  const bool with_cuda =
      &c10::cuda::CUDACachingAllocator::allocator != nullptr && at::cuda::graph_pool_handle != nullptr;
  return with_cuda ? nullptr : "this torch was built without CUDA";
}

std::unique_ptr<Recorder> cuda_recorder(c10::Device device) {
  at::globalContext().lazyInitDevice(at::kCUDA);  // the allocator knows no devices before
  return std::make_unique<CudaRecorder>(device);
}

}  // namespace exportkit

#else

namespace exportkit {
const char* why_no_cuda_recorder() {
  return "the C++ runtime was built with a torch for the CPU, or without CUDA's headers";
}
std::unique_ptr<Recorder> cuda_recorder(c10::Device) { return nullptr; }
}  // namespace exportkit

#endif
