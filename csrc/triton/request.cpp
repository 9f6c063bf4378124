#include "triton/request.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <utility>

#include "triton/config.h"

namespace exportkit::triton {

uint64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

Request::Request(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* triton, Copy& copy, bool batched,
                 uint64_t begin)
    : instance_(instance), triton_(triton), copy_(copy), batched_(batched), begin_(begin), compute_begin_(begin) {}

// --- reading ---------------------------------------------------------------------------------------------------------

void Request::read() noexcept {
  try {
    bool cancelled = false;
    check(TRITONBACKEND_RequestFlags(triton_, &flags_));
    check(TRITONBACKEND_RequestIsCancelled(triton_, &cancelled));
    if (cancelled) throw Failure(TRITONSERVER_ERROR_CANCELLED, "the client gave the request up");
    read_inputs();
    read_outputs();
    if (copy_.method().stateful) find_session();
    if (batched_ && !inputs_.empty()) rows_ = inputs_[0].shape[0];
  } catch (...) {
    failure_ = failure(caught());
  }
}

exportkit_request* Request::call(uint64_t compute_begin) {
  compute_begin_ = compute_begin;
  call_ = {sizeof call_, inputs_.size(), inputs_.data(), session_, nullptr};
  return &call_;
}

void Request::read_inputs() {
  const size_t count = copy_.method().input_count;
  inputs_.resize(count);
  pieces_.resize(count);
  for (size_t i = 0; i < count; ++i) read_input(i);
}

void Request::read_input(size_t index) {
  const exportkit_tensor_info& info = *copy_.method().inputs[index];
  TRITONBACKEND_Input* input = nullptr;
  const int64_t* shape = nullptr;
  uint32_t ndim = 0, buffers = 0;
  check(TRITONBACKEND_RequestInput(triton_, info.name, &input));
  check(TRITONBACKEND_InputProperties(input, nullptr, nullptr, &shape, &ndim, nullptr, &buffers));
  if (info.ndim == 0 && ndim == 1 && shape[0] == 1) ndim = 0;  // Triton has no scalars
  for (uint32_t i = 0; i < buffers; ++i) {
    if (const exportkit_piece piece = read_piece(input, i); piece.size > 0) pieces_[index].push_back(piece);
  }
  inputs_[index] = {info.dl_dtype, static_cast<int32_t>(ndim), shape, pieces_[index].size(), pieces_[index].data()};
}

// Memory of another GPU is refused by exportkit.
exportkit_piece Request::read_piece(TRITONBACKEND_Input* input, uint32_t index) const {
  exportkit_piece piece = {};
  const bool on_gpu = copy_.device().device_type == kDLCUDA;
  TRITONSERVER_MemoryType type = on_gpu ? TRITONSERVER_MEMORY_GPU : TRITONSERVER_MEMORY_CPU;
  int64_t device = copy_.device().device_id;
  check(TRITONBACKEND_InputBuffer(input, index, &piece.data, &piece.size, &type, &device));
  piece.device =
      type == TRITONSERVER_MEMORY_GPU ? DLDevice{kDLCUDA, static_cast<int32_t>(device)} : DLDevice{kDLCPU, 0};
  return piece;
}

void Request::read_outputs() {
  const exportkit_method_info& method = copy_.method();
  uint32_t count = 0;
  check(TRITONBACKEND_RequestOutputCount(triton_, &count));
  wanted_.assign(method.output_count, false);
  for (uint32_t k = 0; k < count; ++k) {
    const char* name = nullptr;
    check(TRITONBACKEND_RequestOutputName(triton_, k, &name));
    for (size_t i = 0; i < method.output_count; ++i) {
      if (std::strcmp(method.outputs[i]->name, name) == 0) wanted_[i] = true;
    }
  }
}

// --- sequences -------------------------------------------------------------------------------------------------------

void Request::find_session() {
  if ((flags_ & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START) == 0) {
    const exportkit_session kept = kept_session();
    copy_.sequences->take(kept);
    session_ = kept;
    return;
  }
  // Triton's memory of a new sequence is not zero: what cannot begin must say so to its next steps.
  keep_session();
  session_ = copy_.sequences->begin(copy_.state_sizes(inputs_));
  keep_session();
}

void Request::keep_session() {
  const int64_t shape[] = {1, kStateBytes};
  TRITONBACKEND_State* state = nullptr;
  check(TRITONBACKEND_StateNew(&state, triton_, kState, TRITONSERVER_TYPE_UINT8, batched_ ? shape : shape + 1,
                               batched_ ? 2 : 1));
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  void* memory = nullptr;
  check(TRITONBACKEND_StateBuffer(state, &memory, kStateBytes, &type, &device));
  if (type == TRITONSERVER_MEMORY_GPU) throw Failure(TRITONSERVER_ERROR_INTERNAL, "Triton keeps states on a GPU");
  std::memcpy(memory, &session_, kStateBytes);
  check(TRITONBACKEND_StateUpdate(state));
}

exportkit_session Request::kept_session() {
  TRITONBACKEND_Input* input = nullptr;
  const void* memory = nullptr;
  uint64_t size = 0;
  TRITONSERVER_MemoryType type = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  check(TRITONBACKEND_RequestInput(triton_, kState, &input));
  check(TRITONBACKEND_InputBuffer(input, 0, &memory, &size, &type, &device));
  exportkit_session session = 0;
  if (type != TRITONSERVER_MEMORY_GPU && size == kStateBytes) std::memcpy(&session, memory, kStateBytes);
  return session;
}

// --- answering -------------------------------------------------------------------------------------------------------

int Request::place(size_t output, int32_t ndim, const int64_t* shape, uint64_t bytes, void** data,
                   DLDevice* device) noexcept {
  // A GPU has only queued its work here.
  if (compute_end_ == 0 && copy_.device().device_type == kDLCPU) compute_end_ = now();
  if (!wanted_[output]) return 0;
  try {
    place_output(output, ndim, shape, bytes, data, device);
    return 1;
  } catch (...) {
    failure_ = failure(caught());
    return -1;
  }
}

void Request::place_output(size_t output, int32_t ndim, const int64_t* shape, uint64_t bytes, void** data,
                           DLDevice* device) {
  const exportkit_tensor_info& info = *copy_.method().outputs[output];
  const int64_t one = 1;
  const bool scalar = ndim == 0;
  if (response_ == nullptr) check(TRITONBACKEND_ResponseNew(&response_, triton_));
  TRITONBACKEND_Output* made = nullptr;
  check(TRITONBACKEND_ResponseOutput(response_, &made, info.name, triton_dtype(info), scalar ? &one : shape,
                                     scalar ? 1 : static_cast<uint32_t>(ndim)));
  const DLDevice here = copy_.device();
  TRITONSERVER_MemoryType type = here.device_type == kDLCUDA ? TRITONSERVER_MEMORY_GPU : TRITONSERVER_MEMORY_CPU;
  int64_t id = here.device_id;
  check(TRITONBACKEND_OutputBuffer(made, data, bytes, &type, &id));
  *device = type == TRITONSERVER_MEMORY_GPU ? DLDevice{kDLCUDA, static_cast<int32_t>(id)} : DLDevice{kDLCPU, 0};
  if (type == TRITONSERVER_MEMORY_GPU && (here.device_type != kDLCUDA || here.device_id != id)) {
    throw Failure(TRITONSERVER_ERROR_INVALID_ARG, "the memory for `", info.name, "` is that of GPU ", id,
                  ", on which the model does not run");
  }
}

void Request::finish(const Failure& failure) noexcept {
  failure_ = failure;
  finish();
}

// A client that is quick sends the next step of a sequence as soon as it has the answer, and Triton 24.10 crashes now
// and then where it has two of them: it has that request back first. Others wait for their answer only.
void Request::finish() noexcept {
  if (compute_end_ == 0) compute_end_ = now();
  if (call_.error != nullptr) {
    Failure found = failure(std::exchange(call_.error, nullptr));
    if (!failure_) failure_ = std::move(found);
  }
  if (session_ != 0) copy_.sequences->give_back(session_, (flags_ & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END) != 0);
  if (response_ == nullptr) ignore(TRITONBACKEND_ResponseNew(&response_, triton_));
  report();
  if (copy_.method().stateful) release();
  if (response_ != nullptr) {
    TRITONSERVER_Error* const error = failure_ ? TRITONSERVER_ErrorNew(failure_->code, failure_->what()) : nullptr;
    ignore(TRITONBACKEND_ResponseSend(response_, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    TRITONSERVER_ErrorDelete(error);
  }
  if (!copy_.method().stateful) release();
}

void Request::release() const noexcept {
  ignore(TRITONBACKEND_RequestRelease(triton_, TRITONSERVER_REQUEST_RELEASE_ALL));
}

void Request::report() const noexcept {
  ignore(TRITONBACKEND_ModelInstanceReportStatistics(instance_, triton_, !failed(), begin_, compute_begin_,
                                                     compute_end_, now()));
}

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
