// Records what is launched on a stream, to launch it again at once: what graphs.h needs of a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace exportkit {

// The memory of a tensor.
struct Span {
  void* address;
  size_t bytes;
};

class Recording {
 public:
  virtual ~Recording() = default;
  // Launches everything on a stream, with arguments and outputs at these addresses, in the order of the recorded spans.
  // What the work writes into an argument is there afterwards. Two launches must not run at the same time: they share
  // the recorded memory.
  virtual void launch(c10::Stream stream, const std::vector<void*>& arguments, const std::vector<void*>& outputs) = 0;
  // Whether launches use an argument where it is. Others go through the recorded memory, which must stay for them.
  virtual bool moves(size_t argument) const = 0;
};

class Recorder {
 public:
  // Where a launch uses its arguments: where they are, if their uses are found, or where they were recorded. Then it
  // copies them there before, and what is written back afterwards.
  enum class Arguments { kMoved, kCopied };
  using Prepare = std::function<void()>;
  using Work = std::function<std::vector<Span>()>;

  virtual ~Recorder() = default;

  // The recordings share memory, so that only one may use it at a time. `acquire` lets a stream wait for the use
  // before, and `release` ends the use that was begun last. Callers take turns.
  virtual void acquire(c10::Stream stream) = 0;
  virtual void release(c10::Stream stream) = 0;
  // Returns when the last use has ended on the device.
  virtual void wait_until_free() = 0;

  // Whether somebody records this stream, so that nothing may be launched on it but what belongs to the recording.
  virtual bool is_recorded(c10::Stream stream) const = 0;
  // Calls `prepare`, then records what `work` launches instead of running it. `work` uses `arguments`, which must not
  // touch one another, writes to those of the indices `written`, and returns the outputs; it may be called twice. Both
  // are called with a stream of the recorder as the current one, which has waited for the current one of the caller;
  // all that `prepare` launches has run when this returns. What `work` allocates comes from memory that all recordings
  // of this recorder share, and that nobody else gets while one of them exists. Throws what the two throw, and
  // c10::Error if something cannot be recorded. Uses may be overlooked: who moves arguments compares the first answers.
  virtual std::unique_ptr<Recording> record(const std::vector<Span>& arguments, const std::vector<size_t>& written,
                                            Arguments how, const Prepare& prepare, const Work& work) = 0;
  // The bytes that the recordings' shared memory takes.
  virtual int64_t memory() const = 0;
};

// Why this build of the library, or the torch it runs with, records no CUDA streams; null if it does.
const char* why_no_cuda_recorder();
std::unique_ptr<Recorder> cuda_recorder(c10::Device device);

}  // namespace exportkit
