#include "runtime/cuda_graph_driver.h"

#include <c10/util/Exception.h>

#include <vector>

#include "runtime/cuda_driver.h"

namespace exportkit {
namespace {

enum NodeType { kKernel = 0, kCopy = 1, kSet = 2, kEmpty = 5 };  // CU_GRAPH_NODE_TYPE_...

// CUDA_MEMCPY3D of cuda.h.
struct End {
  size_t x, y, z, level;
  int memory;
  const void* host;
  uint64_t device;
  void* array;
  void* reserved;
  size_t pitch, height;
};
struct Copy {
  End from, to;
  size_t width, height, depth;
};
static_assert(sizeof(Copy) == 200);

bool is_on_device(const GraphDriver& driver, const End& end) {
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
    find_in_driver("cuStreamBeginCapture_v2", made.begin);
    find_in_driver("cuStreamEndCapture", made.end);
    find_in_driver("cuStreamGetCaptureInfo_v2", made.capture_info);
    find_in_driver("cuGraphInstantiateWithFlags", made.instantiate);
    find_in_driver("cuGraphLaunch", made.launch);
    find_in_driver("cuGraphDestroy", made.destroy);
    find_in_driver("cuGraphExecDestroy", made.destroy_launchable);
    find_in_driver("cuGraphGetNodes", made.nodes);
    find_in_driver("cuGraphNodeGetType", made.node_type);
    find_in_driver("cuGraphMemcpyNodeGetParams", made.copy_of);
    find_in_driver("cuPointerGetAttribute", made.pointer_attribute);
    find_in_driver("cuGetErrorString", made.error_text);
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

unsigned long long GraphDriver::capture_of(void* stream) const {
  constexpr int kActive = 1;  // CU_STREAM_CAPTURE_STATUS_ACTIVE
  int status = 0;
  uint64_t id = 0;
  const int failed = capture_info(stream, &status, &id, nullptr, nullptr, nullptr);
  return failed == 0 && status == kActive ? id : 0;
}

void GraphDriver::check_nodes(void* graph) const {
  size_t count = 0;
  check(nodes(graph, nullptr, &count), "the CUDA graph cannot be read");
  std::vector<void*> all(count);
  check(nodes(graph, all.data(), &count), "the CUDA graph cannot be read");
  for (void* node : all) {
    int type = 0;
    check(node_type(node, &type), "the CUDA graph cannot be read");
    if (type == kKernel || type == kSet || type == kEmpty) continue;
    Copy copy{};
    if (type == kCopy && copy_of(node, &copy) == 0 && is_on_device(*this, copy.from) && is_on_device(*this, copy.to)) {
      continue;
    }
    TORCH_CHECK(type != kCopy, "a call copies between the GPU and the host's memory");
    TORCH_CHECK(false, "a call does what is not only a kernel or a copy on the GPU (node of type ", type,
                "): it calls the host, or allocates memory outside of torch");
  }
}

}  // namespace exportkit
