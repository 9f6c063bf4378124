// Times one call of a package through the C++ and the C interface, and of its compiled code through torch's own runner,
// in turns: calls PACKAGE MODEL.SO. Prints JSON: for each way, the microseconds a call takes in each round.
#include <ATen/Parallel.h>
#include <dlpack/dlpack.h>
#include <exportkit/exportkit.h>
#include <exportkit/runtime.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

constexpr int kRounds = 40, kCalls = 2000;

void check(int code, exportkit_error* error) {
  if (code != EXPORTKIT_OK) throw std::runtime_error(exportkit_error_message(error));
}

double microseconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / kCalls;
}

// A call of the C interface, as a program in C writes it.
class CCall {
 public:
  explicit CCall(const char* package) {
    exportkit_error* error = nullptr;
    check(exportkit_open(package, nullptr, &model_, &error), error);
    const exportkit_description* about = nullptr;
    check(exportkit_describe(model_, &about, &error), error);
    inputs_.resize(about->input_count);
    outputs_.resize(about->output_count);
    check(exportkit_read_case(model_, 0, inputs_.data(), inputs_.size(), nullptr, 0, &error), error);
    for (const DLManagedTensorVersioned* input : inputs_) views_.push_back(&input->dl_tensor);
  }
  void operator()() {
    exportkit_error* error = nullptr;
    check(exportkit_run(model_, views_.data(), views_.size(), outputs_.data(), outputs_.size(), nullptr, &error),
          error);
    for (DLManagedTensorVersioned* output : outputs_) output->deleter(output);
  }

 private:
  exportkit_model model_{};
  std::vector<DLManagedTensorVersioned*> inputs_, outputs_;
  std::vector<const DLTensor*> views_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: " << argv[0] << " PACKAGE MODEL.SO\n";
    return 2;
  }
  try {
    at::set_num_threads(1);
    exportkit::Model model = exportkit::Model::open(argv[1]);
    std::vector<at::Tensor> inputs = model.recorded_case(0).calls[0].inputs;
    torch::inductor::AOTIModelContainerRunnerCpu code(argv[2], 1);
    CCall c(argv[1]);
    const std::vector<std::pair<const char*, std::function<void()>>> ways = {
        {"compiled code, torch's runner in C++", [&] { code.run(inputs); }},
        {"C++", [&] { model.run(inputs); }},
        {"C", [&] { c(); }},
    };
    std::vector<std::vector<double>> times(ways.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < ways.size(); ++i) times[i].push_back(microseconds(ways[i].second));
    }
    for (size_t i = 0; i < ways.size(); ++i) {
      std::cout << (i ? ", \"" : "{\"") << ways[i].first << "\": [";
      for (size_t round = 0; round < times[i].size(); ++round) std::cout << (round ? ", " : "") << times[i][round];
      std::cout << "]";
    }
    std::cout << "}\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
