// Brings the outputs of a call to where the callers of its requests want them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "exportkit/exportkit.h"
#include "exportkit/runtime.h"
#include "runtime/request_inputs.h"

namespace exportkit {

class RequestAnswers {
 public:
  // The answers' memory may be on the CPU or on `device`.
  RequestAnswers(const MethodInfo& method, std::vector<at::Tensor> outputs, c10::Device device,
                 const exportkit_answers& answers);

  // Asks for memory for `rows` rows from `first` on of each output; -1: for all of it. Throws if there is none.
  void place(size_t request, int64_t first, int64_t rows);
  // Begins to copy on the current stream.
  void begin();
  // Ends the copies, after the current stream was waited for.
  void finish() const;

 private:
  struct Copy {
    size_t output;
    uint64_t offset, bytes;
    void* to;
  };

  void place_output(size_t request, size_t output, int64_t first, int64_t rows);
  void on_cpu(size_t output);

  const MethodInfo& method_;
  std::vector<at::Tensor> outputs_, fetched_;
  const c10::Device device_;
  const exportkit_answers& answers_;
  std::vector<Copy> copies_;  // to the CPU
  DeviceCopies on_device_;
};

}  // namespace exportkit
