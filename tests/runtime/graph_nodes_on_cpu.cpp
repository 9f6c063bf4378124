// csrc/runtime/cuda_uses.cpp, cuda_copies.cpp and check_nodes over a driver that only remembers what it is told. Tries
// random graphs from the seeds `argv[1]` to `argv[2]`, prints what is wrong, and ends with 1 if anything is.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <string>

#include "runtime/cuda_copies.h"
#include "runtime/cuda_uses.h"

namespace {

using exportkit::CopyNode;
using exportkit::CudaCopies;
using exportkit::CudaUses;
using exportkit::GraphDriver;
using exportkit::KernelNode;
using exportkit::Span;
using Bytes = std::vector<unsigned char>;

struct Node {
  int type = GraphDriver::kKernel;
  bool readable = true;
  bool library_kernel = false;  // named by `kernel` and not by `function`
  std::vector<Bytes> arguments;
  std::vector<void*> places;
  CopyNode copy{};
};

std::vector<Node> graph;
std::map<void*, std::vector<Bytes>> set_arguments;  // by node, since the last launch
std::map<void*, CopyNode> set_copies;
std::vector<Node> launched;  // by `launch_kernel`

std::vector<Bytes> bytes_of(const Node& node, void** arguments) {
  std::vector<Bytes> found;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const auto* from = static_cast<const unsigned char*>(arguments[i]);
    found.emplace_back(from, from + node.arguments[i].size());
  }
  return found;
}

Node& node_at(void* node) { return *static_cast<Node*>(node); }

int tell_argument(void* function, size_t index, size_t*, size_t* size) {
  const Node& node = node_at(function);
  if (index >= node.arguments.size()) return 1;
  *size = node.arguments[index].size();
  return 0;
}

GraphDriver fake_driver() {
  GraphDriver driver{};
  driver.nodes = [](void*, void** nodes, size_t* count) {
    *count = graph.size();
    for (size_t i = 0; nodes != nullptr && i < graph.size(); ++i) nodes[i] = &graph[i];
    return 0;
  };
  driver.node_type = [](void* node, int* type) {
    *type = node_at(node).type;
    return 0;
  };
  driver.kernel_node = [](void* node, KernelNode* kernel) {
    Node& found = node_at(node);
    found.places.clear();
    for (Bytes& argument : found.arguments) found.places.push_back(argument.data());
    (found.library_kernel ? kernel->kernel : kernel->function) = node;
    kernel->arguments = found.readable ? found.places.data() : nullptr;
    return 0;
  };
  driver.copy_node = [](void* node, CopyNode* copy) {
    *copy = node_at(node).copy;
    return 0;
  };
  driver.function_argument = driver.kernel_argument = tell_argument;
  driver.set_kernel = [](void*, void* node, const KernelNode* kernel) {
    set_arguments[node] = bytes_of(node_at(node), kernel->arguments);
    return 0;
  };
  driver.set_copy = [](void*, void* node, const CopyNode* copy, void*) {
    set_copies[node] = *copy;
    return 0;
  };
  driver.current_context = [](void** context) {
    *context = nullptr;
    return 0;
  };
  driver.pointer_attribute = [](void* value, int, uint64_t pointer) {
    *static_cast<unsigned*>(value) = pointer % 2 == 0 ? 2 : 1;  // even addresses are the device's
    return 0;
  };
  driver.load_module = [](void**, const void*) { return 0; };
  driver.function_in = [](void** function, void*, const char*) {
    static int code;
    *function = &code;
    return 0;
  };
  driver.launch_kernel = [](void*, unsigned grid_x, unsigned grid_y, unsigned, unsigned threads, unsigned, unsigned,
                            unsigned, void*, void** arguments, void**) {
    Node node;
    node.arguments = {Bytes(384)};
    const auto* copies = static_cast<const CudaCopies::Copy*>(arguments[0]);
    for (unsigned i = 0; i < 16; ++i) {
      if (copies[i].bytes != 0) return 1;  // nothing may be copied while it is recorded
    }
    node.copy.width = grid_x * size_t{threads}, node.copy.height = grid_y;
    launched.push_back(node);
    return 0;
  };
  driver.capture_info = [](void*, int* status, uint64_t* id, void**, void* const** last, size_t* count) {
    static void* node;
    node = &launched.back();
    *status = 1, *id = 1, *last = &node, *count = 1;
    return 0;
  };
  driver.error_text = [](int, const char** text) {
    *text = "it fails";
    return 0;
  };
  return driver;
}

const GraphDriver driver = fake_driver();
int failures = 0;

void expect(bool holds, unsigned seed, const char* what) {
  if (holds) return;
  std::cout << "seed " << seed << ": " << what << "\n";
  ++failures;
}

template <class F>
std::string refusal(const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// --- uses ------------------------------------------------------------------------------------------------------------

struct Use {
  size_t node, argument, place, part;
  uint64_t offset;
};

// Arguments of all sizes, with random bytes, and with pointers at multiples of 8 that do or do not point to inputs.
void try_uses(unsigned seed) {
  std::mt19937_64 draw(seed);
  const auto below = [&](uint64_t bound) { return draw() % bound; };
  std::vector<Span> inputs;
  uint64_t free_address = 0x7f0000000000;
  for (size_t i = 0; i < 1 + below(4); ++i) {
    const size_t bytes = below(8) == 0 ? 0 : 1 + below(5000);
    inputs.push_back({reinterpret_cast<void*>(free_address), bytes});
    free_address += bytes + 1 + 511 * below(3);  // parts do not touch one another
  }
  graph.assign(1 + below(6), Node());
  std::vector<Use> uses;
  std::vector<bool> used(inputs.size());
  for (size_t n = 0; n < graph.size(); ++n) {
    Node& node = graph[n];
    node.readable = below(8) != 0;
    node.library_kernel = below(2) == 0;
    if (below(5) == 0) {
      node.type = GraphDriver::kCopy;
      const size_t part = below(inputs.size());
      const uint64_t offset = inputs[part].bytes == 0 ? 0 : below(inputs[part].bytes);
      node.copy.from.device = reinterpret_cast<uint64_t>(inputs[part].address) + offset;
      if (inputs[part].bytes > 0) used[part] = true, uses.push_back({n, 0, 0, part, offset});
      if (inputs[part].bytes == 0) node.copy.from.device = 1;
      continue;
    }
    for (size_t a = 0; a < below(6); ++a) {
      Bytes argument(1 + below(90));
      for (unsigned char& byte : argument) byte = static_cast<unsigned char>(below(100));  // no address
      for (size_t place = 0; place + 8 <= argument.size(); place += 8) {
        const size_t part = below(inputs.size());
        if (below(4) != 0 || inputs[part].bytes == 0) continue;
        const uint64_t offset = below(inputs[part].bytes + 1);  // or the end
        const uint64_t address = reinterpret_cast<uint64_t>(inputs[part].address) + offset;
        std::memcpy(argument.data() + place, &address, 8);
        if (node.readable) used[part] = true, uses.push_back({n, a, place, part, offset});
      }
      node.arguments.push_back(argument);
    }
  }
  bool all_used = true;
  for (size_t i = 0; i < inputs.size(); ++i) all_used &= used[i] || inputs[i].bytes == 0;
  if (!all_used) {
    const std::string said = refusal([&] { CudaUses(driver, nullptr, inputs); });
    return expect(said.find("nothing that reads input") != std::string::npos, seed, "an unread input is taken");
  }
  CudaUses found(driver, nullptr, inputs);
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<const void*> now;
    for (size_t i = 0; i < inputs.size(); ++i) now.push_back(reinterpret_cast<const void*>(below(uint64_t{1} << 47)));
    std::map<void*, std::vector<Bytes>> expected;
    std::map<void*, uint64_t> expected_copies;
    for (const Use& use : uses) {
      Node& node = graph[use.node];
      const uint64_t address = reinterpret_cast<uint64_t>(now[use.part]) + use.offset;
      if (node.type == GraphDriver::kCopy) {
        expected_copies[&node] = address;
        continue;
      }
      auto& arguments = expected.try_emplace(&node, node.arguments).first->second;
      std::memcpy(arguments[use.argument].data() + use.place, &address, 8);
    }
    set_arguments.clear(), set_copies.clear();
    found.read_from(nullptr, now);
    expect(set_arguments == expected, seed, "other arguments are set");
    expect(set_copies.size() == expected_copies.size(), seed, "other copies are set");
    for (const auto& [node, copy] : set_copies) {
      expect(copy.from.device == expected_copies[node], seed, "a copy reads elsewhere");
    }
    set_arguments.clear(), set_copies.clear();
    found.read_from(nullptr, now);
    expect(set_arguments.empty() && set_copies.empty(), seed, "what stayed the same is set again");
  }
}

// --- copies ----------------------------------------------------------------------------------------------------------

// What the kernel does with its arguments.
void run_copies() {
  for (const auto& [node, arguments] : set_arguments) {
    const auto* copies = reinterpret_cast<const CudaCopies::Copy*>(arguments[0].data());
    for (size_t i = 0; i < 16; ++i) {
      if (copies[i].bytes > 0) std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    }
  }
}

void try_copies(unsigned seed) {
  std::mt19937_64 draw(seed);
  const size_t count = draw() % 40;
  std::vector<Bytes> own(count), given(count);
  std::vector<CudaCopies::Copy> copies;
  uint64_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    own[i].resize(draw() % 300), given[i].resize(own[i].size());
    for (unsigned char& byte : own[i]) byte = static_cast<unsigned char>(draw());
    copies.push_back({own[i].data(), own[i].data(), own[i].size()});
    most = std::max<uint64_t>(most, own[i].size());
  }
  launched.clear();
  launched.reserve(8);  // the nodes' addresses stay
  CudaCopies made(driver, c10::Device(c10::kCUDA, 0), nullptr, copies);
  expect(launched.size() == (count + 15) / 16, seed, "another number of kernels");
  size_t rows = 0;
  for (const Node& node : launched) rows += node.copy.height;
  expect(rows == count, seed, "another number of copies");
  std::vector<void*> to;
  std::vector<const void*> from;
  for (size_t i = 0; i < count; ++i) to.push_back(given[i].data()), from.push_back(given[i].data());
  set_arguments.clear();
  made.write_to(nullptr, to);
  run_copies();
  expect(own == given, seed, "outputs are not copied");
  for (Bytes& bytes : given) {
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(draw());
  }
  CudaCopies inputs(driver, c10::Device(c10::kCUDA, 0), nullptr, copies);
  set_arguments.clear();
  inputs.read_from(nullptr, from);
  run_copies();
  expect(own == given, seed, "inputs are not copied");
  for (size_t i = 0; i < count; ++i) from[i] = own[i].data();
  inputs.read_from(nullptr, from);
  for (const auto& [node, arguments] : set_arguments) {
    const auto* last = reinterpret_cast<const CudaCopies::Copy*>(arguments[0].data());
    for (size_t i = 0; i < 16; ++i) expect(last[i].from != last[i].to || last[i].bytes == 0, seed, "copied to itself");
  }
}

// --- what a graph may have -------------------------------------------------------------------------------------------

void try_nodes() {
  constexpr int kHost = 1, kDevice = 2, kUnified = 4;
  const auto said = [](Node node) {
    graph = {Node(), node};
    return refusal([] { driver.check_nodes(nullptr); });
  };
  for (int type = 0; type < 14; ++type) {
    Node node;
    node.type = type;
    node.copy.from.memory = node.copy.to.memory = kDevice;
    const bool allowed = type == 0 || type == 1 || type == 2 || type == 5;
    expect(said(node).empty() == allowed, unsigned(type), "a node of this type");
  }
  for (int from : {kHost, kDevice, kUnified}) {
    for (int to : {kHost, kDevice, kUnified}) {
      for (uint64_t address : {1000, 1001}) {
        Node node;
        node.type = GraphDriver::kCopy;
        node.copy.from.memory = from, node.copy.to.memory = to;
        node.copy.from.device = node.copy.to.device = address;
        const auto on_device = [&](int memory) {
          return memory == kDevice || (memory == kUnified && address % 2 == 0);
        };
        expect(said(node).empty() == (on_device(from) && on_device(to)), unsigned(from * 10 + to), "a copy");
      }
    }
  }
}

}  // namespace

int main(int, char** argv) {
  const unsigned end = unsigned(std::atoi(argv[2]));
  for (unsigned seed = unsigned(std::atoi(argv[1])); seed < end; ++seed) {
    try_uses(seed);
    try_copies(seed);
  }
  try_nodes();
  return failures == 0 ? 0 : 1;
}
