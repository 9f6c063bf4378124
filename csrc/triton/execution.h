// An instance of a model, which answers the requests that Triton gives it together.
#pragma once

#include <span>
#include <vector>

#include "triton/model.h"
#include "triton/request.h"
#include "triton/triton_interface.h"

namespace exportkit::triton {

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
