// Copies within a GPU that begin with one launch.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace exportkit {

// A copy of its own costs a launch each, and the engine that does it rests after a moment without work.
class DeviceCopies {
 public:
  explicit DeviceCopies(c10::Device device) : device_(device) {}

  // Bytes on the device.
  void add(void* to, const void* from, uint64_t bytes) { copies_.push_back({to, from, bytes}); }
  // Begins them on the current stream.
  void begin();

 private:
  struct Copy {
    void* to;
    const void* from;
    uint64_t bytes;
  };

  const c10::Device device_;
  std::vector<Copy> copies_;
};

}  // namespace exportkit
