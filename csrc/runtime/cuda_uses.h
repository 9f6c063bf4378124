// Where a CUDA graph reads memory that may be elsewhere at each launch: the arguments of kernels and copies that point
// there.
#pragma once

#include <memory>
#include <vector>

#include "runtime/cuda_graph_driver.h"
#include "runtime/recorder.h"

namespace exportkit {

class CudaUses {
 public:
  // Finds the arguments that point into `memory`, or to the end of one of its parts, which therefore must not touch one
  // another. Throws c10::Error if no argument points into one of the parts, or the driver does not tell arguments.
  // Overlooks addresses that kernels get in another form, or find in memory.
  CudaUses(const GraphDriver& driver, void* graph, const std::vector<Span>& memory);

  // Sets where launches read, in the order of `memory`.
  void read_from(void* launchable, const std::vector<const void*>& addresses);

 private:
  // A pointer into part `part` of the memory.
  struct Word {
    size_t part;
    uint64_t offset;
    uint64_t* place;  // in the arguments below
  };
  struct Kernel {
    void* node;
    KernelNode kernel;
    std::unique_ptr<uint64_t[]> bytes;  // the arguments', each at a multiple of 8
    std::vector<void*> arguments;
    std::vector<Word> words;
  };
  struct Copied {
    void* node;
    CopyNode copy;
    size_t part;
    uint64_t offset;
  };

  bool find(uint64_t value, size_t& part, uint64_t& offset);
  void add_kernel(void* node);
  void add_copy(void* node);

  const GraphDriver& driver_;
  const std::vector<Span> memory_;
  std::vector<bool> found_;
  std::vector<Kernel> kernels_;
  std::vector<Copied> copies_;
  std::vector<const void*> current_;
};

}  // namespace exportkit
