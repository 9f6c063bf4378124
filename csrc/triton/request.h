// A request of Triton: its inputs for exportkit, and its response; and an instance of a model, which answers the
// requests that Triton gives it together.
#pragma once

#include <exportkit/exportkit.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "triton/errors.h"
#include "triton/model.h"
#include "triton/triton_interface.h"

namespace exportkit::triton {

// Nanoseconds of the clock that Triton's statistics use.
uint64_t now();

class Request {
 public:
  // `begin`: when Triton gave it.
  Request(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* triton, Copy& copy, bool batched,
          uint64_t begin);

  // Reads the inputs, and finds or begins the session of a sequence. What fails is the request's failure.
  void read() noexcept;
  bool failed() const { return failure_.has_value(); }
  // What exportkit_run_requests is given, at this time.
  exportkit_request* call(uint64_t compute_begin);
  // The rows, of which a batch has some; without batches 1.
  int64_t rows() const { return rows_; }

  // For exportkit_answers. The first output ends the model's computation.
  int place(size_t output, int32_t ndim, const int64_t* shape, uint64_t bytes, void** data, DLDevice* device) noexcept;
  // Ends the step of a sequence, gives the request back to Triton, and sends the outputs, or why there are none.
  void finish() noexcept;
  // The same, for a failure of all requests.
  void finish(const Failure& failure) noexcept;
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
  void report() const noexcept;
  void release() const noexcept;

  TRITONBACKEND_ModelInstance* const instance_;
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
  int64_t rows_ = 1;
  uint64_t begin_, compute_begin_ = 0, compute_end_ = 0;
};

class Instance {
 public:
  Instance(TRITONBACKEND_ModelInstance* triton, Copy& copy, int64_t rows) : triton_(triton), copy_(copy), rows_(rows) {}

  // Answers and releases each request.
  void execute(std::span<TRITONBACKEND_Request* const> given);

 private:
  void run(std::vector<Request*>& requests, uint64_t compute_begin);
  void report(const std::vector<Request*>& requests, uint64_t begin, uint64_t compute_begin);

  TRITONBACKEND_ModelInstance* const triton_;
  Copy& copy_;
  const int64_t rows_;
};

}  // namespace exportkit::triton
