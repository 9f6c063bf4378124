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
  static const GraphDriver found{};
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
