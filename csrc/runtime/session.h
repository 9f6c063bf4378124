// The compiled code of one target with its weights, for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <memory>
#include <vector>

namespace torch::inductor {
class AOTIModelContainerRunner;
}

namespace exportkit {

class Session {
 public:
  // Loads a target's library, which must have been checked: this executes it. torch finds the calls of custom operators
  // in a .json beside it, and CUDA kernels in files beside it. Throws what torch's loader throws.
  Session(const std::filesystem::path& library, c10::Device device, int64_t runners);
  ~Session();

  // The flat outputs for flat inputs that the package allows, on the current stream of the model's device. As many
  // calls as there are runners go on at a time; the others wait.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

 private:
  c10::Device device_;
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner_;
};

}  // namespace exportkit
