// A request of Triton: its inputs for exportkit, and its response.
#pragma once

#include <exportkit/exportkit.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "triton/errors.h"
#include "triton/model.h"
#include "triton/triton_interface.h"

namespace exportkit::triton {

// Nanoseconds of the clock that Triton's statistics use.
uint64_t now();

class Request {
 public:
  Request(TRITONBACKEND_Request* triton, Copy& copy, bool batched);

  // Reads the inputs, and finds or begins the session of a sequence. What fails is the request's failure.
  void read() noexcept;
  bool failed() const { return failure_.has_value(); }
  exportkit_request* call() { return &call_; }
  // The rows, of which a batch has some; without batches 1.
  int64_t rows() const { return batched_ && !inputs_.empty() ? inputs_[0].shape[0] : 1; }

  // For exportkit_answers. The first output ends the model's computation.
  int place(size_t output, int32_t ndim, const int64_t* shape, uint64_t bytes, void** data, DLDevice* device) noexcept;
  // Sends the outputs, or why there are none.
  void respond() noexcept;
  // A failure of all requests.
  void fail(const Failure& failure) { failure_ = failure; }

  // Reports statistics, ends the step of a sequence, and gives the request back to Triton.
  void release(TRITONBACKEND_ModelInstance* instance, uint64_t begin, uint64_t compute_begin) noexcept;
  uint64_t compute_end() const { return compute_end_; }

 private:
  void read_inputs();
  void read_input(size_t index);
  exportkit_piece read_piece(TRITONBACKEND_Input* input, uint32_t index) const;
  void read_outputs();
  void find_session();
  void keep_session();
  exportkit_session kept_session();
  void place_output(size_t output, int32_t ndim, const int64_t* shape, uint64_t bytes, void** data, DLDevice* device);

  TRITONBACKEND_Request* const triton_;
  Copy& copy_;
  const bool batched_;
  exportkit_request call_ = {};
  std::vector<exportkit_request_input> inputs_;
  std::vector<std::vector<exportkit_piece>> pieces_;
  std::vector<bool> wanted_;  // of each output
  uint32_t flags_ = 0;
  exportkit_session session_ = 0;
  TRITONBACKEND_Response* response_ = nullptr;
  std::optional<Failure> failure_;
  uint64_t compute_end_ = 0, end_ = 0;
};

}  // namespace exportkit::triton
