// The nodes of a CUDA graph: where they use memory, and a kernel that copies memory, which may be elsewhere at each
// launch.
#pragma once

#include <c10/core/Device.h>

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
