// csrc/runtime/cuda_nodes.cpp over a driver that only remembers what it is told. Tries random graphs from the seeds
// `argv[1]` to `argv[2]`, prints what is wrong, and ends with 1 if anything is.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>

#include "runtime/cuda_nodes.h"

// There is no driver: each of its functions that is called has another in its place.
void* exportkit::driver_function(const char*) {
  static int there;
  return &there;
}

namespace {

using exportkit::CopyNode;
using exportkit::CudaCopies;
using exportkit::CudaUses;
using exportkit::GraphDriver;
using exportkit::KernelNode;
using exportkit::SetNode;
using exportkit::Span;
using Bytes = std::vector<unsigned char>;

// The arguments of a kernel; of a copy or memset, its description is the only one.
struct Node {
  int type = GraphDriver::kKernel;
  bool readable = true;
  bool library_kernel = false;             // named by `kernel` and not by `function`
  std::vector<Bytes> arguments, launched;  // as they were recorded, and as a launch has them
  std::vector<void*> places;
  int times_set = 0;
};

std::vector<Node> graph, kernels;  // `kernels`: by `launch_kernel`
unsigned copies_of_kernels = 0;
int fails_at = 0;  // the node that cannot be set; 0 is none

Node& node_at(void* node) { return *static_cast<Node*>(node); }

template <class Description>
int describe(void* node, Description* description) {
  std::memcpy(description, node_at(node).arguments[0].data(), sizeof *description);
  return 0;
}

int set(void* node, const void* const* arguments) {
  Node& found = node_at(node);
  for (size_t i = 0; i < found.launched.size(); ++i) {
    std::memcpy(found.launched[i].data(), arguments[i], found.launched[i].size());
  }
  ++found.times_set;
  return fails_at > 0 && --fails_at == 0 ? 1 : 0;
}

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
  driver.copy_node = describe<CopyNode>;
  driver.set_node = describe<SetNode>;
  driver.function_argument = driver.kernel_argument = tell_argument;
  driver.set_kernel = [](void*, void* node, const KernelNode* kernel) { return set(node, kernel->arguments); };
  driver.set_copy = [](void*, void* node, const CopyNode* copy, void*) {
    const void* const arguments[] = {copy};
    return set(node, arguments);
  };
  driver.set_set = [](void*, void* node, const SetNode* description, void*) {
    const void* const arguments[] = {description};
    return set(node, arguments);
  };
  driver.current_context = [](void**) { return 0; };
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
  driver.launch_kernel = [](void*, unsigned, unsigned grid_y, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                            void** arguments, void**) {
    const auto* copies = static_cast<const CudaCopies::Copy*>(arguments[0]);
    for (unsigned i = 0; i < 16; ++i) {
      if (copies[i].bytes != 0) return 1;  // nothing may be copied while it is recorded
    }
    kernels.emplace_back().launched = {Bytes(384)};
    copies_of_kernels += grid_y;
    return 0;
  };
  driver.capture_info = [](void*, int* status, uint64_t* id, void**, void* const** last, size_t* count) {
    static void* node;
    node = &kernels.back();
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
bool is_refused(const F& f) {
  try {
    f();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

// --- uses ------------------------------------------------------------------------------------------------------------

// A word of a node's argument that points into a part of the memory.
struct Use {
  size_t node, argument, place, part;
  uint64_t offset;
};

struct Scene {
  std::vector<Span> memory;
  std::vector<Use> uses;
};

// Arguments of all sizes, with random bytes, and with pointers at multiples of 8 that do or do not point to the memory;
// copies and memsets.
Scene drawn(std::mt19937_64& draw) {
  const auto below = [&](uint64_t bound) { return draw() % bound; };
  Scene scene;
  uint64_t free_address = 0x7f0000000000;
  for (size_t i = 0; i < 1 + below(4); ++i) {
    const size_t bytes = below(8) == 0 ? 0 : 1 + below(5000);
    scene.memory.push_back({reinterpret_cast<void*>(free_address), bytes});
    free_address += bytes + 1 + 511 * below(3);  // parts do not touch one another
  }
  graph.assign(1 + below(6), Node());
  // Points to a random part, or its end.
  const auto point = [&](size_t node, size_t argument, size_t place) {
    const size_t part = below(scene.memory.size());
    if (scene.memory[part].bytes == 0) return;
    const uint64_t offset = below(scene.memory[part].bytes + 1);
    const uint64_t address = reinterpret_cast<uint64_t>(scene.memory[part].address) + offset;
    std::memcpy(graph[node].arguments[argument].data() + place, &address, 8);
    if (graph[node].readable) scene.uses.push_back({node, argument, place, part, offset});
  };
  for (size_t n = 0; n < graph.size(); ++n) {
    Node& node = graph[n];
    const uint64_t kind = below(8);
    if (kind == 0) {
      node.type = GraphDriver::kCopy;
      node.arguments = {Bytes(sizeof(CopyNode))};
      point(n, 0, offsetof(CopyNode, from.device));
      if (below(2) == 0) point(n, 0, offsetof(CopyNode, to.device));
    } else if (kind == 1) {
      node.type = GraphDriver::kSet;
      node.arguments = {Bytes(sizeof(SetNode))};
      point(n, 0, offsetof(SetNode, to));
    } else {
      node.readable = below(8) != 0;
      node.library_kernel = below(2) == 0;
      for (size_t a = 0; a < below(6); ++a) {
        Bytes& argument = node.arguments.emplace_back(1 + below(90));
        for (unsigned char& byte : argument) byte = static_cast<unsigned char>(below(100));  // no address
        for (size_t place = 0; place + 8 <= argument.size(); place += 8) {
          if (below(4) == 0) point(n, a, place);
        }
      }
    }
    node.launched = node.arguments;
  }
  return scene;
}

void try_uses(unsigned seed) {
  std::mt19937_64 draw(seed);
  const Scene scene = drawn(draw);
  CudaUses found(driver, nullptr, scene.memory);
  std::vector<void*> now;
  for (size_t i = 0; i < scene.memory.size(); ++i) {
    bool expected = scene.memory[i].bytes == 0;
    for (const Use& use : scene.uses) expected = expected || use.part == i;
    expect(found.finds(i) == expected, seed, "a use that is none, or none that is one");
    now.push_back(scene.memory[i].address);
  }
  std::vector<bool> changed(now.size());
  for (int turn = 0; turn < 5; ++turn) {
    for (size_t i = 0; i < now.size(); ++i) {
      if (changed[i] || draw() % 2 == 0) continue;  // after a failure, the same addresses are set again
      changed[i] = true;
      now[i] = reinterpret_cast<void*>(draw() % (uint64_t{1} << 47));
    }
    for (Node& node : graph) node.times_set = 0;
    fails_at = draw() % 4 == 0 ? 1 : 0;
    const bool failed = is_refused([&] { found.move(nullptr, now); });
    fails_at = 0;
    std::vector<Node> wanted = graph;
    for (Node& node : wanted) node.launched = node.arguments, node.times_set = 0;
    for (const Use& use : scene.uses) {
      const uint64_t address = reinterpret_cast<uint64_t>(now[use.part]) + use.offset;
      std::memcpy(wanted[use.node].launched[use.argument].data() + use.place, &address, 8);
      if (changed[use.part]) wanted[use.node].times_set = 1;
    }
    for (size_t n = 0; n < graph.size() && !failed; ++n) {
      expect(graph[n].launched == wanted[n].launched, seed, "a launch has other arguments");
      expect(graph[n].times_set == wanted[n].times_set, seed, "a node is set in vain, or twice");
    }
    changed.assign(now.size(), failed);  // which nodes were set is unknown
  }
}

// --- copies ----------------------------------------------------------------------------------------------------------

// Does what the kernels do with their arguments; returns how many copies that are.
size_t run_copies() {
  size_t count = 0;
  for (const Node& node : kernels) {
    const auto* copies = reinterpret_cast<const CudaCopies::Copy*>(node.launched[0].data());
    for (size_t i = 0; i < 16; ++i) {
      if (copies[i].bytes == 0) continue;
      std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
      ++count;
    }
  }
  return count;
}

int times_set() {
  int times = 0;
  for (const Node& node : kernels) times += node.times_set;
  return times;
}

void try_copies(unsigned seed) {
  std::mt19937_64 draw(seed);
  const size_t count = draw() % 40;
  std::vector<Bytes> own(count), given(count);
  std::vector<CudaCopies::Copy> copies;
  for (size_t i = 0; i < count; ++i) {
    own[i].resize(draw() % 300), given[i].resize(own[i].size());
    for (unsigned char& byte : own[i]) byte = static_cast<unsigned char>(draw());
    copies.push_back({own[i].data(), own[i].data(), own[i].size()});
  }
  kernels.clear(), copies_of_kernels = 0;
  kernels.reserve(8);  // the nodes' addresses stay
  CudaCopies made(driver, c10::Device(c10::kCUDA, 0), nullptr, copies);
  expect(kernels.size() == (count + 15) / 16, seed, "another number of kernels");
  expect(copies_of_kernels == count, seed, "another number of copies");
  for (int turn = 0; turn < 2; ++turn) {
    for (size_t i = 0; i < count; ++i) made.write(i, given[i].data());
    made.update(nullptr);
    run_copies();
    expect(own == given, seed, "outputs are not copied");
    expect(size_t(times_set()) == kernels.size(), seed, "what stayed the same is set again");
  }
  for (size_t i = 0; i < count; ++i) made.write(i, own[i].data());
  made.update(nullptr);
  expect(run_copies() == 0, seed, "copied to itself");
  for (Bytes& bytes : given) {
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(draw());
  }
  for (size_t i = 0; i < count; ++i) made.read(i, given[i].data());
  made.update(nullptr);
  run_copies();
  expect(own == given, seed, "inputs are not copied");
}

// --- what a graph may have -------------------------------------------------------------------------------------------

bool is_allowed(int type, const CopyNode& copy) {
  Node node;
  node.type = type;
  node.arguments = {Bytes(sizeof copy)};
  std::memcpy(node.arguments[0].data(), &copy, sizeof copy);
  graph = {Node(), node};
  return !is_refused([] { driver.check_nodes(nullptr); });
}

void try_nodes() {
  constexpr int kHost = 1, kDevice = 2, kUnified = 4;
  CopyNode copy{};
  copy.from.memory = copy.to.memory = kDevice;
  for (int type = 0; type < 14; ++type) {
    const bool allowed = type == 0 || type == 1 || type == 2 || type == 5;
    expect(is_allowed(type, copy) == allowed, unsigned(type), "a node of this type");
  }
  for (int from : {kHost, kDevice, kUnified}) {
    for (int to : {kHost, kDevice, kUnified}) {
      for (uint64_t address : {1000, 1001}) {
        copy.from.memory = from, copy.to.memory = to;
        copy.from.device = copy.to.device = address;
        const auto on_device = [&](int memory) {
          return memory == kDevice || (memory == kUnified && address % 2 == 0);
        };
        const bool allowed = is_allowed(GraphDriver::kCopy, copy);
        expect(allowed == (on_device(from) && on_device(to)), unsigned(from * 10 + to), "a copy");
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
