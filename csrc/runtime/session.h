// The compiled code of one target with its weights, for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

namespace torch::inductor {
class AOTIModelPackageLoader;
}

namespace exportkit {

class Session {
 public:
  /// Loads a target of the package at `path`, which must have been checked: this executes it.
  ///
  /// Throws what torch's loader throws.
  Session(const std::string& path, const std::string& target, c10::Device device, int64_t runners);
  ~Session();

  /// The flat outputs for flat inputs that the package allows, on the current stream of the model's device.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

 private:
  c10::Device device_;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
};

}  // namespace exportkit
