// Where a CUDA graph uses memory, found in the arguments of its nodes.
#pragma once

#include <memory>
#include <vector>

#include "runtime/cuda_driver.h"
#include "runtime/recorder.h"

namespace exportkit {

// Words of kernels' arguments that point into given memory, or behind its end, and copies and memsets there. Launches
// can use that memory elsewhere, to read and to write. Addresses in another form are overlooked.
class CudaUses {
 public:
  // Looks for uses in a graph. The parts of `memory` must not touch one another.
  CudaUses(const GraphDriver& driver, void* graph, const std::vector<Span>& memory);

  // Whether a use of a part was found, or the part is empty.
  bool finds(size_t part) const { return !users_[part].empty() || memory_[part].bytes == 0; }

  // Sets where launches use the parts, in the order of `memory`. What stays where it was costs nothing.
  void move(void* launchable, const std::vector<void*>& addresses);

 private:
  // A pointer into part `part` of the memory.
  struct Pointer {
    size_t part;
    uint64_t offset;
    uint64_t* place;  // in the node below
  };
  struct Node {
    void* node;
    int type;
    KernelNode kernel;
    std::unique_ptr<uint64_t[]> bytes;  // the kernel's arguments', each at a multiple of 8
    std::vector<void*> arguments;
    CopyNode copy;
    SetNode set;
    std::vector<Pointer> pointers;
    bool is_due = false;
  };

  void look_at(uint64_t* place, Node& node) const;
  void read_kernel(Node& node) const;
  void set(void* launchable, Node& node, void* context) const;

  const GraphDriver& driver_;
  const std::vector<Span> memory_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::vector<Node*>> users_;  // of each part
  std::vector<void*> current_;             // addresses; empty if unknown
};

}  // namespace exportkit
