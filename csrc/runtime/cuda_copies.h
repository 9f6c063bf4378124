// A kernel of a CUDA graph that copies memory, which may be elsewhere at each launch.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "runtime/cuda_graph_driver.h"

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

  // Sets where launches read, or write. A copy to its own place is left out.
  void read_from(void* launchable, const std::vector<const void*>& addresses);
  void write_to(void* launchable, const std::vector<void*>& addresses);

 private:
  static constexpr size_t kAtOnce = 16;  // copies of a kernel

  struct Arguments {
    Copy copies[kAtOnce] = {};
  };
  struct Node {
    void* node = nullptr;
    KernelNode kernel;
    Arguments arguments;
  };

  void set(void* launchable);

  const GraphDriver& driver_;
  std::vector<Copy> copies_;
  std::vector<Node> nodes_;
};

}  // namespace exportkit
