// The functions of the CUDA driver that make, change and launch graphs. 0 is success, as in cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace exportkit {

// CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h.
struct KernelNode {
  void* function = nullptr;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  void** arguments = nullptr;
  void** extra = nullptr;
  void* kernel = nullptr;  // used if `function` is null
  void* context = nullptr;
};
static_assert(sizeof(KernelNode) == 72);

// CUDA_MEMCPY3D of cuda.h.
struct CopyNode {
  struct End {
    size_t x, y, z, level;
    int memory;
    const void* host;
    uint64_t device;
    void* array;
    void* reserved;
    size_t pitch, height;
  };
  End from, to;
  size_t width, height, depth;
};
static_assert(sizeof(CopyNode) == 200);

// CUDA_MEMSET_NODE_PARAMS of cuda.h.
struct SetNode {
  uint64_t to;
  size_t pitch;
  unsigned value, element_bytes;
  size_t width, height;
};
static_assert(sizeof(SetNode) == 40);

struct GraphDriver {
  static constexpr int kThreadLocal = 1;       // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may do anything
  static constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: the default stream does not wait for it
  enum NodeType { kKernel = 0, kCopy = 1, kSet = 2, kEmpty = 5 };  // CU_GRAPH_NODE_TYPE_...

  int (*make_stream)(void** stream, unsigned flags);
  int (*load_module)(void** module, const void* image);
  int (*function_in)(void** function, void* module, const char* name);
  int (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
                       void** extra);
  int (*current_context)(void** context);
  int (*begin)(void* stream, int mode);
  int (*end)(void* stream, void** graph);
  int (*capture_info)(void* stream, int* status, uint64_t* id, void** graph, void* const** last, size_t* count);
  int (*instantiate)(void** launchable, void* graph, unsigned long long flags);
  int (*launch)(void* launchable, void* stream);
  int (*destroy)(void* graph);
  int (*destroy_launchable)(void* launchable);
  int (*nodes)(void* graph, void** nodes, size_t* count);
  int (*node_type)(void* node, int* type);
  int (*kernel_node)(void* node, KernelNode* kernel);
  int (*copy_node)(void* node, CopyNode* copy);
  int (*set_node)(void* node, SetNode* set);
  int (*set_kernel)(void* launchable, void* node, const KernelNode* kernel);
  int (*set_copy)(void* launchable, void* node, const CopyNode* copy, void* context);
  int (*set_set)(void* launchable, void* node, const SetNode* set, void* context);
  // These two give the size of a kernel's argument, and fail after the last one. Drivers before CUDA 12.4 lack them;
  // they are null then.
  int (*function_argument)(void* function, size_t index, size_t* offset, size_t* size);
  int (*kernel_argument)(void* kernel, size_t index, size_t* offset, size_t* size);
  int (*pointer_attribute)(void* value, int attribute, uint64_t pointer);
  int (*error_text)(int error, const char** text);

  static const GraphDriver& get();

  // c10::Error with `what` and the driver's own words if `error` is one.
  void check(int error, const char* what) const;
  // The number of the capture that a stream is in; 0 if it is in none.
  uint64_t capture_of(void* stream) const;
  // The node that was captured last on a stream.
  void* last_node(void* stream) const;
  // Calls each(node, type) for all nodes of a graph.
  template <class Each>
  void for_nodes(void* graph, const Each& each) const {
    size_t count = 0;
    check(nodes(graph, nullptr, &count), kUnreadable);
    const auto all = std::make_unique<void*[]>(count);
    check(nodes(graph, all.get(), &count), kUnreadable);
    for (size_t i = 0; i < count; ++i) {
      int type = 0;
      check(node_type(all[i], &type), kUnreadable);
      each(all[i], type);
    }
  }
  // Throws c10::Error if a launch of the graph might do something else than the captured call. That is so if a node
  // calls a function on the host, reads or writes the host's memory, or allocates memory.
  void check_nodes(void* graph) const;

 private:
  static constexpr const char* kUnreadable = "the CUDA graph cannot be read";
};

}  // namespace exportkit
