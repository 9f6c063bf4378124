// Copies to a GPU at the rate of its bus, through pinned memory. From other memory, the driver copies in one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace exportkit {

// Fewer bytes are copied about as soon without staging, which pins memory and starts threads.
inline constexpr uint64_t kWorthStaging = uint64_t{64} << 20;

// What goes to a place in the GPU's memory.
struct StagedPart {
  const char* from;
  uint64_t place, bytes;
};

// Each lane has a thread, and two pinned buffers: it fills one while the other is copied.
struct Lanes {
  size_t count;  // at most; there are no more than processors
  size_t buffer_bytes;
};

// The lanes that copy so many bytes soonest, as benchmarks/copies_to_gpu.cpp measured. Before the first copy, their
// memory is pinned: 4.9 GB/s on an H200's host, however many threads do it.
inline Lanes lanes_for(uint64_t bytes) {
  if (bytes < uint64_t{512} << 20) return {4, size_t{1} << 20};
  return {8, size_t{2} << 20};
}

// Copies memory as memcpy does, perhaps from elsewhere. Several threads call it.
using ReadPart = std::function<void(const char* from, char* to, size_t bytes)>;

// Copies the parts, which are in the order of their places and do not overlap, to `to` on a CUDA device, whose bytes
// between the parts are overwritten too. Nothing else may use that memory. The copies have ended when this returns, and
// so has the use of pinned memory. Returns false if the driver refuses something, such as pinned memory: copy in
// another way then. Throws what `read` throws.
bool copy_staged(int device, char* to, const std::vector<StagedPart>& parts, const ReadPart& read, Lanes lanes);

}  // namespace exportkit
