#include "triton/execution.h"

#include <algorithm>
#include <deque>

namespace exportkit::triton {

void Instance::execute(std::span<TRITONBACKEND_Request* const> given) {
  const uint64_t begin = now();
  std::deque<Request> requests;
  std::vector<Request*> good;
  for (TRITONBACKEND_Request* each : given) {
    Request& request = requests.emplace_back(triton_, each, copy_, rows_ > 0, begin);
    request.read();
    request.failed() ? request.finish() : good.push_back(&request);
  }
  if (good.empty()) return;
  const uint64_t compute_begin = now();
  run(good, compute_begin);
  report(good, begin, compute_begin);
}

void Instance::run(std::vector<Request*>& requests, uint64_t compute_begin) {
  std::vector<exportkit_request*> calls;
  for (Request* request : requests) calls.push_back(request->call(compute_begin));
  exportkit_answers answers = {};
  answers.size = sizeof answers;
  answers.context = &requests;
  answers.place = [](size_t request, size_t output, DLDataType, int32_t ndim, const int64_t* shape, uint64_t bytes,
                     void** data, DLDevice* device, void* context) {
    return (*static_cast<std::vector<Request*>*>(context))[request]->place(output, ndim, shape, bytes, data, device);
  };
  answers.ended = [](size_t request, void* context) {
    (*static_cast<std::vector<Request*>*>(context))[request]->finish();
  };
  exportkit_run_options options = {};
  options.size = sizeof options;
  if (copy_.device().device_type == kDLCUDA) options.flags = EXPORTKIT_OWN_STREAM;
  exportkit_error* error = nullptr;
  exportkit_run_requests(copy_.handle(), copy_.method().name, calls.data(), calls.size(), rows_, &answers, &options,
                         &error);
  if (error == nullptr) return;
  const Failure all = failure(error);
  for (Request* request : requests) request->finish(all);
}

// Triton joins requests of equal shapes only, so that they are one call, unless it fails.
void Instance::report(const std::vector<Request*>& requests, uint64_t begin, uint64_t compute_begin) {
  int64_t rows = 0;
  uint64_t compute_end = 0;
  for (const Request* request : requests) {
    if (request->failed()) continue;
    rows += request->rows();
    compute_end = std::max(compute_end, request->compute_end());
  }
  if (rows == 0) return;
  ignore(TRITONBACKEND_ModelInstanceReportBatchStatistics(triton_, static_cast<uint64_t>(rows), begin, compute_begin,
                                                          compute_end, now()));
}

}  // namespace exportkit::triton
