// Calls the CUDA driver, which is loaded on first use: one build of this library works with and without CUDA. Types and
// names are as in cuda.h; 0 is success.
#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace exportkit {

// The address of one of the driver's functions; null if the driver lacks it. Throws c10::Error if there is no driver.
void* driver_function(const char* name);

// One of the driver's functions. Throws c10::Error if there is no driver, or if it lacks a function that is needed.
template <class Signature>
class DriverFunction {
 public:
  explicit DriverFunction(const char* name, bool needed = true)
      : function_(reinterpret_cast<Signature*>(driver_function(name))) {
    TORCH_CHECK(function_ != nullptr || !needed, "the CUDA driver has no ", name);
  }
  // Another function in its place.
  DriverFunction& operator=(Signature* function) {
    function_ = function;
    return *this;
  }
  operator Signature*() const { return function_; }

 private:
  Signature* function_;
};

// The newest CUDA that the driver supports, such as "13.0"; nothing without a driver.
std::optional<std::string> driver_cuda();

// (major, minor) of a device's compute capability. c10::Error if the driver does not report it.
std::pair<int, int> cuda_capability(int device);

// Makes a device's context current in this thread if none is. Compiled code launches kernels through the driver, which
// needs a current context. torch sets one with a thread's first call of CUDA's runtime, which a new thread has not
// made.
void ensure_cuda_context(int device);

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

  DriverFunction<int(void** stream, unsigned flags)> make_stream{"cuStreamCreate"};
  DriverFunction<int(void** module, const void* image)> load_module{"cuModuleLoadData"};
  DriverFunction<int(void** function, void* module, const char* name)> function_in{"cuModuleGetFunction"};
  DriverFunction<int(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                     unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
                     void** extra)>
      launch_kernel{"cuLaunchKernel"};
  DriverFunction<int(void** context)> current_context{"cuCtxGetCurrent"};
  DriverFunction<int(void* stream, int mode)> begin{"cuStreamBeginCapture_v2"};
  DriverFunction<int(void* stream, void** graph)> end{"cuStreamEndCapture"};
  DriverFunction<int(void* stream, int* status, uint64_t* id, void** graph, void* const** last, size_t* count)>
      capture_info{"cuStreamGetCaptureInfo_v2"};
  DriverFunction<int(void** launchable, void* graph, unsigned long long flags)> instantiate{
      "cuGraphInstantiateWithFlags"};
  DriverFunction<int(void* launchable, void* stream)> launch{"cuGraphLaunch"};
  DriverFunction<int(void* graph)> destroy{"cuGraphDestroy"};
  DriverFunction<int(void* launchable)> destroy_launchable{"cuGraphExecDestroy"};
  DriverFunction<int(void* graph, void** nodes, size_t* count)> nodes{"cuGraphGetNodes"};
  DriverFunction<int(void* node, int* type)> node_type{"cuGraphNodeGetType"};
  DriverFunction<int(void* node, KernelNode* kernel)> kernel_node{"cuGraphKernelNodeGetParams_v2"};
  DriverFunction<int(void* node, CopyNode* copy)> copy_node{"cuGraphMemcpyNodeGetParams"};
  DriverFunction<int(void* node, SetNode* set)> set_node{"cuGraphMemsetNodeGetParams"};
  DriverFunction<int(void* launchable, void* node, const KernelNode* kernel)> set_kernel{
      "cuGraphExecKernelNodeSetParams_v2"};
  DriverFunction<int(void* launchable, void* node, const CopyNode* copy, void* context)> set_copy{
      "cuGraphExecMemcpyNodeSetParams"};
  DriverFunction<int(void* launchable, void* node, const SetNode* set, void* context)> set_set{
      "cuGraphExecMemsetNodeSetParams"};
  // These two give the size of a kernel's argument, and fail after the last one. Drivers before CUDA 12.4 lack them;
  // they are null then.
  DriverFunction<int(void* function, size_t index, size_t* offset, size_t* size)> function_argument{
      "cuFuncGetParamInfo", /*needed=*/false};
  DriverFunction<int(void* kernel, size_t index, size_t* offset, size_t* size)> kernel_argument{"cuKernelGetParamInfo",
                                                                                                /*needed=*/false};
  DriverFunction<int(void* value, int attribute, uint64_t pointer)> pointer_attribute{"cuPointerGetAttribute"};
  DriverFunction<int(int error, const char** text)> error_text{"cuGetErrorString"};

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
