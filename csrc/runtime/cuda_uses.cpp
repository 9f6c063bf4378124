#include "runtime/cuda_uses.h"

#include <c10/util/Exception.h>

#include <algorithm>
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
    : driver_(driver), memory_(memory), found_(memory.size()) {
  driver.for_nodes(graph, [&](void* node, int type) {
    if (type == GraphDriver::kKernel) add_kernel(node);
    if (type == GraphDriver::kCopy) add_copy(node);
  });
  for (size_t part = 0; part < memory.size(); ++part) {
    TORCH_CHECK(found_[part] || memory[part].bytes == 0, "nothing that reads input ", part, " is found");
  }
}

bool CudaUses::find(uint64_t value, size_t& part, uint64_t& offset) {
  for (part = 0; part < memory_.size(); ++part) {
    offset = value - reinterpret_cast<uint64_t>(memory_[part].address);
    if (memory_[part].bytes == 0 || offset > memory_[part].bytes) continue;
    found_[part] = true;
    return true;
  }
  return false;
}

void CudaUses::add_kernel(void* node) {
  Kernel found{node, {}, nullptr, {}, {}};
  driver_.check(driver_.kernel_node(node, &found.kernel), "a kernel's arguments cannot be read");
  const std::vector<size_t> sizes = argument_sizes(driver_, found.kernel);
  const auto words_of = [](size_t size) { return (size + 7) / 8; };
  size_t words = 0;
  for (size_t size : sizes) words += words_of(size);
  found.bytes = std::make_unique<uint64_t[]>(words);
  uint64_t* place = found.bytes.get();
  for (size_t i = 0; i < sizes.size(); place += words_of(sizes[i]), ++i) {
    std::memcpy(place, found.kernel.arguments[i], sizes[i]);
    found.arguments.push_back(place);
    for (size_t word = 0; word < sizes[i] / 8; ++word) {
      Word use{0, 0, place + word};
      if (find(place[word], use.part, use.offset)) found.words.push_back(use);
    }
  }
  if (!found.words.empty()) kernels_.push_back(std::move(found));
}

void CudaUses::add_copy(void* node) {
  Copied found{node, {}, 0, 0};
  driver_.check(driver_.copy_node(node, &found.copy), "a copy's arguments cannot be read");
  if (find(found.copy.from.device, found.part, found.offset)) copies_.push_back(found);
}

void CudaUses::read_from(void* launchable, const std::vector<const void*>& addresses) {
  if (addresses == current_) return;
  const auto at = [&](size_t part, uint64_t offset) { return reinterpret_cast<uint64_t>(addresses[part]) + offset; };
  current_.clear();  // unknown, if this fails
  for (Kernel& use : kernels_) {
    for (const Word& word : use.words) *word.place = at(word.part, word.offset);
    use.kernel.arguments = use.arguments.data();
    driver_.check(driver_.set_kernel(launchable, use.node, &use.kernel), "the CUDA graph cannot be changed");
  }
  void* context = nullptr;
  if (!copies_.empty()) driver_.check(driver_.current_context(&context), "there is no CUDA context");
  for (Copied& use : copies_) {
    use.copy.from.device = at(use.part, use.offset);
    driver_.check(driver_.set_copy(launchable, use.node, &use.copy, context), "the CUDA graph cannot be changed");
  }
  current_ = addresses;
}

}  // namespace exportkit
