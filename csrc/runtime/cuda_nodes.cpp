#include "runtime/cuda_nodes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace exportkit {

namespace {

// The sizes of a kernel's arguments; none if they were given in another form, as some libraries do.
std::vector<size_t> argument_sizes(const GraphDriver& driver, const KernelNode& kernel) {
  const auto of = kernel.function != nullptr ? driver.function_argument : driver.kernel_argument;
  TORCH_CHECK(of != nullptr, "this CUDA driver is older than 12.4 and does not tell the arguments of kernels");
  std::vector<size_t> sizes;
  if (kernel.arguments == nullptr) return sizes;
  for (size_t offset = 0, size = 0;; sizes.push_back(size)) {
    if (of(kernel.function != nullptr ? kernel.function : kernel.kernel, sizes.size(), &offset, &size) != 0) break;
  }
  return sizes;
}

// --- copies ----------------------------------------------------------------------------------------------------------

// Compiled by the driver for its GPU, so that no compiler is needed where this library is built. Block (x, y) copies
// every gridDim.x-th part of copy y, 16 bytes a thread where both addresses are multiples of 16:
//
//   struct Copy { const char* from; char* to; uint64_t bytes; };
//   __global__ void copies(Copy all[16]) {
//     const Copy copy = all[blockIdx.y];
//     const uint64_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
//     const uint64_t vectors = (uint64_t(copy.from) | uint64_t(copy.to)) % 16 == 0 ? copy.bytes / 16 : 0;
//     for (uint64_t i = first; i < vectors; i += step) ((uint4*)copy.to)[i] = ((const uint4*)copy.from)[i];
//     for (uint64_t i = 16 * vectors + first; i < copy.bytes; i += step) copy.to[i] = copy.from[i];
//   }
constexpr const char* kKernel = R"(
.version 6.3
.target sm_75
.address_size 64
.visible .entry copies(.param .align 8 .b8 all[384])
{
  .reg .pred %p;
  .reg .b16 %byte;
  .reg .b32 %y, %x, %size, %thread, %blocks, %a, %b, %c, %d;
  .reg .b64 %copy, %from, %to, %bytes, %i, %step, %vectors, %end, %read, %write, %offset;
  mov.b64 %copy, all;
  mov.u32 %y, %ctaid.y;
  mul.wide.u32 %offset, %y, 24;
  add.s64 %copy, %copy, %offset;
  ld.param.u64 %from, [%copy];
  ld.param.u64 %to, [%copy+8];
  ld.param.u64 %bytes, [%copy+16];
  mov.u32 %x, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %blocks, %nctaid.x;
  mul.wide.u32 %i, %x, %size;
  cvt.u64.u32 %offset, %thread;
  add.s64 %i, %i, %offset;
  mul.wide.u32 %step, %blocks, %size;
  or.b64 %offset, %from, %to;
  and.b64 %offset, %offset, 15;
  setp.eq.u64 %p, %offset, 0;
  shr.u64 %vectors, %bytes, 4;
  selp.b64 %vectors, %vectors, 0, %p;
  cvta.to.global.u64 %from, %from;
  cvta.to.global.u64 %to, %to;
  mov.u64 %offset, %i;
VECTORS:
  setp.ge.u64 %p, %offset, %vectors;
  @%p bra REST;
  shl.b64 %end, %offset, 4;
  add.s64 %read, %from, %end;
  add.s64 %write, %to, %end;
  ld.global.v4.u32 {%a, %b, %c, %d}, [%read];
  st.global.v4.u32 [%write], {%a, %b, %c, %d};
  add.s64 %offset, %offset, %step;
  bra VECTORS;
REST:
  shl.b64 %end, %vectors, 4;
  add.s64 %offset, %end, %i;
BYTES:
  setp.ge.u64 %p, %offset, %bytes;
  @%p bra DONE;
  add.s64 %read, %from, %offset;
  add.s64 %write, %to, %offset;
  ld.global.u8 %byte, [%read];
  st.global.u8 [%write], %byte;
  add.s64 %offset, %offset, %step;
  bra BYTES;
DONE:
  ret;
}
)";

void* kernel_for(const GraphDriver& driver, c10::Device device) {
  static std::mutex mutex;
  static auto& kernels = *new std::map<c10::DeviceIndex, void*>;
  const std::lock_guard lock(mutex);
  void*& kernel = kernels[device.index()];
  if (kernel == nullptr) {
    void* module = nullptr;
    driver.check(driver.load_module(&module, kKernel), "the CUDA driver refuses the kernel that copies");
    driver.check(driver.function_in(&kernel, module, "copies"), "the CUDA driver lost the kernel that copies");
  }
  return kernel;
}

// --- the driver ------------------------------------------------------------------------------------------------------

bool is_on_device(const GraphDriver& driver, const CopyNode::End& end) {
  constexpr int kDevice = 2, kUnified = 4;  // CU_MEMORYTYPE_...
  constexpr int kMemoryType = 2;            // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  if (end.memory != kUnified) return end.memory == kDevice;
  unsigned found = 0;
  return driver.pointer_attribute(&found, kMemoryType, end.device) == 0 && found == kDevice;
}

}  // namespace

CudaUses::CudaUses(const GraphDriver& driver, void* graph, const std::vector<Span>& memory)
    : driver_(driver), memory_(memory), users_(memory.size()) {
  for (const Span& span : memory) current_.push_back(span.address);
  driver.for_nodes(graph, [&](void* node, int type) {
    auto found = std::make_unique<Node>(Node{node, type, {}, nullptr, {}, {}, {}, {}});
    if (type == GraphDriver::kKernel) {
      read_kernel(*found);
    } else if (type == GraphDriver::kCopy) {
      driver_.check(driver_.copy_node(node, &found->copy), "a copy's arguments cannot be read");
      look_at(&found->copy.from.device, *found);
      look_at(&found->copy.to.device, *found);
    } else if (type == GraphDriver::kSet) {
      driver_.check(driver_.set_node(node, &found->set), "a memset's arguments cannot be read");
      look_at(&found->set.to, *found);
    }
    if (found->pointers.empty()) return;
    nodes_.push_back(std::move(found));
    for (const Pointer& pointer : nodes_.back()->pointers) users_[pointer.part].push_back(nodes_.back().get());
  });
}

void CudaUses::look_at(uint64_t* place, Node& node) const {
  for (size_t part = 0; part < memory_.size(); ++part) {
    const uint64_t offset = *place - reinterpret_cast<uint64_t>(memory_[part].address);
    if (memory_[part].bytes == 0 || offset > memory_[part].bytes) continue;
    node.pointers.push_back({part, offset, place});
    return;
  }
}

void CudaUses::read_kernel(Node& node) const {
  driver_.check(driver_.kernel_node(node.node, &node.kernel), "a kernel's arguments cannot be read");
  const std::vector<size_t> sizes = argument_sizes(driver_, node.kernel);
  const auto words_of = [](size_t size) { return (size + 7) / 8; };
  size_t words = 0;
  for (size_t size : sizes) words += words_of(size);
  node.bytes = std::make_unique<uint64_t[]>(words);
  uint64_t* place = node.bytes.get();
  for (size_t i = 0; i < sizes.size(); place += words_of(sizes[i]), ++i) {
    std::memcpy(place, node.kernel.arguments[i], sizes[i]);
    node.arguments.push_back(place);
    for (size_t word = 0; word < sizes[i] / 8; ++word) look_at(place + word, node);
  }
}

// A node is set once, however many of its pointers change.
void CudaUses::move(void* launchable, const std::vector<void*>& addresses) {
  for (size_t part = 0; part < memory_.size(); ++part) {
    if (!current_.empty() && current_[part] == addresses[part]) continue;
    for (Node* node : users_[part]) node->is_due = true;
  }
  current_.clear();  // unknown, if this fails
  void* context = nullptr;
  for (const auto& node : nodes_) {
    if (!node->is_due) continue;
    if (node->type != GraphDriver::kKernel && context == nullptr) {
      driver_.check(driver_.current_context(&context), "there is no CUDA context");
    }
    for (const Pointer& pointer : node->pointers) {
      *pointer.place = reinterpret_cast<uint64_t>(addresses[pointer.part]) + pointer.offset;
    }
    set(launchable, *node, context);
    node->is_due = false;
  }
  current_ = addresses;
}

void CudaUses::set(void* launchable, Node& node, void* context) const {
  int failed = 0;
  if (node.type == GraphDriver::kKernel) {
    node.kernel.arguments = node.arguments.data();
    failed = driver_.set_kernel(launchable, node.node, &node.kernel);
  } else if (node.type == GraphDriver::kCopy) {
    failed = driver_.set_copy(launchable, node.node, &node.copy, context);
  } else {
    failed = driver_.set_set(launchable, node.node, &node.set, context);
  }
  driver_.check(failed, "the CUDA graph cannot be changed");
}

CudaCopies::CudaCopies(const GraphDriver& driver, c10::Device device, void* stream, std::vector<Copy> copies)
    : driver_(driver), copies_(std::move(copies)) {
  constexpr unsigned kThreads = 256, kMostBlocks = 2048;
  nodes_.resize((copies_.size() + kAtOnce - 1) / kAtOnce);
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const auto begin = copies_.begin() + n * kAtOnce;
    const auto end = copies_.begin() + std::min(copies_.size(), (n + 1) * kAtOnce);
    uint64_t most = 1;
    for (auto copy = begin; copy != end; ++copy) most = std::max(most, copy->bytes);
    Node& node = nodes_[n];
    node.kernel.function = kernel_for(driver, device);
    node.kernel.grid[0] = unsigned(std::min<uint64_t>(kMostBlocks, (most + 16 * kThreads - 1) / (16 * kThreads)));
    node.kernel.grid[1] = unsigned(end - begin);
    node.kernel.block[0] = kThreads;
    void* arguments[] = {&node.arguments};  // copies of no bytes, so far
    driver.check(driver.launch_kernel(node.kernel.function, node.kernel.grid[0], node.kernel.grid[1], 1, kThreads, 1, 1,
                                      0, stream, arguments, nullptr),
                 "the kernel that copies cannot be launched");
    node.node = driver.last_node(stream);
  }
}

void CudaCopies::update(void* launchable) {
  for (size_t n = 0; n < nodes_.size(); ++n) {
    Node& node = nodes_[n];
    if (!node.is_changed) continue;
    const size_t begin = n * kAtOnce, end = std::min(copies_.size(), begin + kAtOnce);
    for (size_t i = begin; i < end; ++i) {
      Copy& copy = node.arguments.copies[i - begin];
      copy = copies_[i];
      if (copy.from == copy.to) copy.bytes = 0;
    }
    void* arguments[] = {&node.arguments};
    node.kernel.arguments = arguments;
    driver_.check(driver_.set_kernel(launchable, node.node, &node.kernel), "the CUDA graph cannot be changed");
    node.is_changed = false;
  }
}

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
