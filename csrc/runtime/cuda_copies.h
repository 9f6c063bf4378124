// A kernel of a CUDA graph that copies memory, which may be elsewhere at each launch.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "runtime/cuda_driver.h"

namespace exportkit {

class CudaCopies {
 public:
  struct Copy {
    const void* from;
    void* to;
    uint64_t bytes;
  };

  // Adds the copies to the graph that `stream` is capturing. The device must be the current one.
  CudaCopies(const GraphDriver& driver, c10::Device device, void* stream, std::vector<Copy> copies);

  // Sets where launches read and write, from the next `update` on. A copy to its own place is left out.
  void read(size_t copy, const void* from) { change(copy, copies_[copy].from, from); }
  void write(size_t copy, void* to) { change(copy, copies_[copy].to, to); }
  // Changes the launchable graph where that is needed.
  void update(void* launchable);

 private:
  static constexpr size_t kAtOnce = 16;  // copies of a kernel

  struct Arguments {
    Copy copies[kAtOnce] = {};
  };
  struct Node {
    void* node = nullptr;
    KernelNode kernel;
    Arguments arguments;
    bool is_changed = true;
  };

  template <class Address>
  void change(size_t copy, Address& address, Address to) {
    if (address == to) return;
    address = to;
    nodes_[copy / kAtOnce].is_changed = true;
  }

  const GraphDriver& driver_;
  std::vector<Copy> copies_;
  std::vector<Node> nodes_;
};

}  // namespace exportkit
