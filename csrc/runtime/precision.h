// The process's TF32 switches.
#pragma once

#include <ATen/Context.h>

#include <mutex>
#include <utility>

namespace exportkit {

// The switches as they were when a CUDA model's cases were recorded, while this object lives.
class RecordedPrecision {
 public:
  RecordedPrecision(c10::Device device, bool tf32) {
    if (!device.is_cuda()) return;
    lock_ = std::unique_lock(one_at_a_time());
    before_ = {context().allowTF32CuBLAS(), context().allowTF32CuDNN()};
    allow(tf32, tf32);
  }
  ~RecordedPrecision() {
    if (lock_) allow(before_.first, before_.second);
  }
  RecordedPrecision(const RecordedPrecision&) = delete;
  RecordedPrecision& operator=(const RecordedPrecision&) = delete;

 private:
  static std::mutex& one_at_a_time() {
    static std::mutex mutex;
    return mutex;
  }
  static at::Context& context() { return at::globalContext(); }
  static void allow(bool products, bool convolutions) {
    context().setAllowTF32CuBLAS(products);
    context().setAllowTF32CuDNN(convolutions);
  }

  std::unique_lock<std::mutex> lock_;
  std::pair<bool, bool> before_;
};

}  // namespace exportkit
