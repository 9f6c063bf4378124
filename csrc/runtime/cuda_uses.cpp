#include "runtime/cuda_uses.h"

#include <c10/util/Exception.h>

#include <cstring>

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

}  // namespace exportkit
