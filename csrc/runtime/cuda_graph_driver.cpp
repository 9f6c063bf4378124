#include "runtime/cuda_graph_driver.h"

#include <c10/util/Exception.h>

#include "runtime/cuda_driver.h"

namespace exportkit {
namespace {

bool is_on_device(const GraphDriver& driver, const CopyNode::End& end) {
  constexpr int kDevice = 2, kUnified = 4;  // CU_MEMORYTYPE_...
  constexpr int kMemoryType = 2;            // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  if (end.memory != kUnified) return end.memory == kDevice;
  unsigned found = 0;
  return driver.pointer_attribute(&found, kMemoryType, end.device) == 0 && found == kDevice;
}

}  // namespace

const GraphDriver& GraphDriver::get() {
  static const GraphDriver found = [] {
    GraphDriver made{};
    find_in_driver("cuStreamCreate", made.make_stream);
    find_in_driver("cuModuleLoadData", made.load_module);
    find_in_driver("cuModuleGetFunction", made.function_in);
    find_in_driver("cuLaunchKernel", made.launch_kernel);
    find_in_driver("cuCtxGetCurrent", made.current_context);
    find_in_driver("cuStreamBeginCapture_v2", made.begin);
    find_in_driver("cuStreamEndCapture", made.end);
    find_in_driver("cuStreamGetCaptureInfo_v2", made.capture_info);
    find_in_driver("cuGraphInstantiateWithFlags", made.instantiate);
    find_in_driver("cuGraphLaunch", made.launch);
    find_in_driver("cuGraphDestroy", made.destroy);
    find_in_driver("cuGraphExecDestroy", made.destroy_launchable);
    find_in_driver("cuGraphGetNodes", made.nodes);
    find_in_driver("cuGraphNodeGetType", made.node_type);
    find_in_driver("cuGraphKernelNodeGetParams_v2", made.kernel_node);
    find_in_driver("cuGraphMemcpyNodeGetParams", made.copy_node);
    find_in_driver("cuGraphMemsetNodeGetParams", made.set_node);
    find_in_driver("cuGraphExecKernelNodeSetParams_v2", made.set_kernel);
    find_in_driver("cuGraphExecMemcpyNodeSetParams", made.set_copy);
    find_in_driver("cuGraphExecMemsetNodeSetParams", made.set_set);
    find_in_driver("cuPointerGetAttribute", made.pointer_attribute);
    find_in_driver("cuGetErrorString", made.error_text);
    find_if_in_driver("cuFuncGetParamInfo", made.function_argument);
    find_if_in_driver("cuKernelGetParamInfo", made.kernel_argument);
    return made;
  }();
  return found;
}

void GraphDriver::check(int error, const char* what) const {
  if (error == 0) return;
  const char* text = nullptr;
  error_text(error, &text);
  TORCH_CHECK(false, what, ": ", text == nullptr ? "unknown error" : text);
}

uint64_t GraphDriver::capture_of(void* stream) const {
  constexpr int kActive = 1;  // CU_STREAM_CAPTURE_STATUS_ACTIVE
  int status = 0;
  uint64_t id = 0;
  const int failed = capture_info(stream, &status, &id, nullptr, nullptr, nullptr);
  return failed == 0 && status == kActive ? id : 0;
}

void* GraphDriver::last_node(void* stream) const {
  int status = 0;
  uint64_t id = 0;
  void* const* last = nullptr;
  size_t count = 0;
  check(capture_info(stream, &status, &id, nullptr, &last, &count), kUnreadable);
  TORCH_CHECK(count == 1, kUnreadable);
  return last[0];
}

void GraphDriver::check_nodes(void* graph) const {
  for_nodes(graph, [&](void* node, int type) {
    if (type == kKernel || type == kSet || type == kEmpty) return;
    TORCH_CHECK(type == kCopy, "a call runs a function on the host, or allocates memory outside of torch (node type ",
                type, ")");
    CopyNode copy{};
    const bool on_device =
        copy_node(node, &copy) == 0 && is_on_device(*this, copy.from) && is_on_device(*this, copy.to);
    TORCH_CHECK(on_device, "a call copies between the GPU and the host's memory");
  });
}

}  // namespace exportkit
