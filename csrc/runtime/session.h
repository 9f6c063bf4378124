// The compiled code of one target with its weights, for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace torch::inductor {
class AOTIModelContainerRunner;
}

namespace exportkit {

// Tensors by AOTInductor's names for them (the original FQNs); a target's `constants` in the manifest.
using Constants = std::map<std::string, at::Tensor>;

class Session {
 public:
  // Loads a target's library, which must have been checked: this executes it. torch finds the calls of custom operators
  // in a .json beside it, and CUDA kernels in files beside it. `constants` are all the tensors that the code takes from
  // outside, on the CPU and of the strides in the manifest; none where its weights are inside. Code for the CPU works
  // on these very tensors, which may be mapped from a file. Throws what torch's loader throws.
  Session(const std::filesystem::path& library, c10::Device device, int64_t runners, Constants constants = {});
  ~Session();

  // The flat outputs for flat inputs that the package allows, on the current stream of the model's device. As many
  // calls as there are runners go on at a time; the others wait.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

 private:
  void set_constants();
  void copy_constants(const std::map<std::string, std::string>& names);

  c10::Device device_;
  Constants constants_;
  std::vector<at::Tensor> aliases_;  // what the compiled code has of them: tensors that own nothing
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner_;
};

// What the calls that begin now run on. Each call keeps the one that it began with: another can take its place
// meanwhile.
class CurrentSession {
 public:
  explicit CurrentSession(std::shared_ptr<const Session> session) : session_(std::move(session)) {}

  std::shared_ptr<const Session> get() const {
    const std::lock_guard lock(reading_);
    return session_;
  }
  // Puts what `make` returns in its place, one at a time; if it throws, the one before stays.
  template <class Make>
  void replace(const Make& make) {
    const std::lock_guard one_at_a_time(replacing_);
    std::shared_ptr<const Session> session = make();
    const std::lock_guard lock(reading_);
    session_.swap(session);  // the last of the calls that have it, or this, lets go of the one before
  }

 private:
  std::mutex replacing_;
  mutable std::mutex reading_;
  std::shared_ptr<const Session> session_;
};

}  // namespace exportkit
