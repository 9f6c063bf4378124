#include "runtime/cuda_copies.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace exportkit {
namespace {

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

}  // namespace

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

}  // namespace exportkit
