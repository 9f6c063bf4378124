// csrc/runtime/cuda_nodes.cpp over a driver that only remembers what it is told. Tries
// random graphs from the seeds `argv[1]` to `argv[2]`, prints what is wrong, and ends with 1 if anything is.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <numeric>
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

struct Node {
  int type = GraphDriver::kKernel;
  bool readable = true;
  bool library_kernel = false;  // named by `kernel` and not by `function`
  std::vector<Bytes> arguments;
  std::vector<void*> places;
  CopyNode copy{};
  SetNode set{};
};

std::vector<Node> graph;
std::map<void*, std::vector<Bytes>> set_arguments;  // by node, since the last launch
std::map<void*, CopyNode> set_copies;
std::map<void*, SetNode> set_sets;
int times_set = 0;
int fails_at = 0;            // the kernel that cannot be set; 0 is none
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
  driver.set_node = [](void* node, SetNode* set) {
    *set = node_at(node).set;
    return 0;
  };
  driver.function_argument = driver.kernel_argument = tell_argument;
  driver.set_kernel = [](void*, void* node, const KernelNode* kernel) {
    set_arguments[node] = bytes_of(node_at(node), kernel->arguments);
    ++times_set;
    return fails_at > 0 && --fails_at == 0 ? 1 : 0;
  };
  driver.set_copy = [](void*, void* node, const CopyNode* copy, void*) {
    set_copies[node] = *copy;
    ++times_set;
    return 0;
  };
  driver.set_set = [](void*, void* node, const SetNode* set, void*) {
    set_sets[node] = *set;
    ++times_set;
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

struct Scene {
  std::vector<Span> memory;
  std::vector<Use> uses;
  std::vector<bool> used;  // each part
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
  scene.used.assign(scene.memory.size(), false);
  graph.assign(1 + below(6), Node());
  // An address in a random part, or none.
  const auto point = [&](size_t node, size_t argument, size_t place, uint64_t bound) -> uint64_t {
    const size_t part = below(scene.memory.size());
    if (scene.memory[part].bytes == 0) return 1;
    const uint64_t offset = below(scene.memory[part].bytes + bound);
    if (graph[node].readable) {
      scene.used[part] = true;
      scene.uses.push_back({node, argument, place, part, offset});
    }
    return reinterpret_cast<uint64_t>(scene.memory[part].address) + offset;
  };
  for (size_t n = 0; n < graph.size(); ++n) {
    Node& node = graph[n];
    const uint64_t kind = below(8);
    if (kind == 0) {
      node.type = GraphDriver::kCopy;
      node.copy.from.device = point(n, 0, 0, 0);
      node.copy.to.device = below(2) == 0 ? 1 : point(n, 0, 1, 0);
      continue;
    }
    if (kind == 1) {
      node.type = GraphDriver::kSet;
      node.set.to = point(n, 0, 2, 0);
      continue;
    }
    node.readable = below(8) != 0;
    node.library_kernel = below(2) == 0;
    for (size_t a = 0; a < below(6); ++a) {
      Bytes argument(1 + below(90));
      for (unsigned char& byte : argument) byte = static_cast<unsigned char>(below(100));  // no address
      for (size_t place = 0; place + 8 <= argument.size(); place += 8) {
        if (below(4) != 0) continue;
        const uint64_t address = point(n, a, place, 1);  // or the end
        std::memcpy(argument.data() + place, &address, 8);
      }
      node.arguments.push_back(argument);
    }
  }
  return scene;
}

void forget_what_was_set() {
  set_arguments.clear(), set_copies.clear(), set_sets.clear();
  times_set = 0;
}

// Whether exactly the nodes that use a changed part were set, each once, and as they must be.
void expect_set(unsigned seed, const Scene& scene, const std::vector<void*>& now, const std::vector<bool>& changed) {
  std::map<void*, std::vector<Bytes>> arguments;
  std::map<void*, CopyNode> copies;
  std::map<void*, SetNode> sets;
  for (const Use& use : scene.uses) {
    Node& node = graph[use.node];
    if (!changed[use.part]) continue;
    if (node.type == GraphDriver::kKernel) arguments.try_emplace(&node, node.arguments);
    if (node.type == GraphDriver::kCopy) copies.try_emplace(&node, node.copy);
    if (node.type == GraphDriver::kSet) sets.try_emplace(&node, node.set);
  }
  for (const Use& use : scene.uses) {
    Node& node = graph[use.node];
    const uint64_t address = reinterpret_cast<uint64_t>(now[use.part]) + use.offset;
    if (arguments.count(&node)) std::memcpy(arguments[&node][use.argument].data() + use.place, &address, 8);
    if (copies.count(&node)) (use.place == 0 ? copies[&node].from : copies[&node].to).device = address;
    if (sets.count(&node)) sets[&node].to = address;
  }
  expect(set_arguments == arguments, seed, "other arguments are set");
  const auto same = [](const auto& one, const auto& other) {
    return one.first == other.first && std::memcmp(&one.second, &other.second, sizeof(one.second)) == 0;
  };
  expect(std::equal(set_copies.begin(), set_copies.end(), copies.begin(), copies.end(), same), seed, "other copies");
  expect(std::equal(set_sets.begin(), set_sets.end(), sets.begin(), sets.end(), same), seed, "other memsets are set");
  expect(size_t(times_set) == arguments.size() + copies.size() + sets.size(), seed, "a node is set twice");
}

void try_uses(unsigned seed) {
  std::mt19937_64 draw(seed);
  const Scene scene = drawn(draw);
  CudaUses found(driver, nullptr, scene.memory);
  std::vector<void*> now;
  for (size_t i = 0; i < scene.memory.size(); ++i) {
    const bool expected = scene.used[i] || scene.memory[i].bytes == 0;
    expect(found.finds(i) == expected, seed, "a use that is none, or none that is one");
    now.push_back(scene.memory[i].address);
  }
  std::vector<bool> changed(now.size());
  for (int turn = 0; turn < 5; ++turn) {
    for (size_t i = 0; i < now.size(); ++i) {
      changed[i] = changed[i] || draw() % 2 == 0;
      if (changed[i]) now[i] = reinterpret_cast<void*>(draw() % (uint64_t{1} << 47));
    }
    forget_what_was_set();
    fails_at = draw() % 4 == 0 ? 1 : 0;
    const bool failed = !refusal([&] { found.move(nullptr, now); }).empty();
    fails_at = 0;
    if (!failed) expect_set(seed, scene, now, changed);
    changed.assign(now.size(), failed);  // which nodes were set is unknown
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
  for (size_t i = 0; i < count; ++i) made.write(i, to[i]);
  made.update(nullptr);
  run_copies();
  expect(own == given, seed, "outputs are not copied");
  forget_what_was_set();
  for (size_t i = 0; i < count; ++i) made.write(i, to[i]);
  made.update(nullptr);
  expect(times_set == 0, seed, "what stayed the same is set again");
  for (Bytes& bytes : given) {
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(draw());
  }
  CudaCopies inputs(driver, c10::Device(c10::kCUDA, 0), nullptr, copies);
  set_arguments.clear();
  for (size_t i = 0; i < count; ++i) inputs.read(i, from[i]);
  inputs.update(nullptr);
  run_copies();
  expect(own == given, seed, "inputs are not copied");
  for (size_t i = 0; i < count; ++i) inputs.read(i, own[i].data());
  inputs.update(nullptr);
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
    fails_at = 0;
    try_copies(seed);
  }
  try_nodes();
  return failures == 0 ? 0 : 1;
}
