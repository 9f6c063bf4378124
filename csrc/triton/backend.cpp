// What Triton calls: a backend that runs exportkit packages through exportkit's C interface.
//
// REPOSITORY/NAME.exportkit/1/ANY.pt2 is a model without any config.pbtxt; REPOSITORY/NAME/1/model.pt2 is one with the
// line `backend: "exportkit"`. All else comes from the package.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "triton/errors.h"
#include "triton/model.h"

namespace exportkit::triton {
namespace {

// Nanoseconds of the clock that Triton's statistics use.
uint64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

// A request of Triton: its inputs for exportkit, and its response.
class Request {
 public:
  // `begin`: when Triton gave it.
  Request(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* triton, Copy& copy, bool batched,
          uint64_t begin)
      : instance_(instance), triton_(triton), copy_(copy), batched_(batched), begin_(begin), compute_begin_(begin) {}

  // Reads the inputs, and finds or begins the session of a sequence. What fails is the request's failure.
  void read() noexcept {
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

  bool failed() const { return failure_.has_value(); }

  // What exportkit_run_requests is given, at this time.
  exportkit_request* call(uint64_t compute_begin) {
    compute_begin_ = compute_begin;
    call_ = {sizeof call_, inputs_.size(), inputs_.data(), session_, nullptr};
    return &call_;
  }

  // The rows, of which a batch has some; without batches 1.
  int64_t rows() const { return rows_; }

  // For exportkit_answers. The first output ends the model's computation.
  int place(size_t output, int32_t ndim, const int64_t* shape, uint64_t bytes, void** data, DLDevice* device) noexcept {
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

  // Ends the request with a failure of all requests.
  void finish(const Failure& failure) noexcept {
    failure_ = failure;
    finish();
  }

  // Ends the step of a sequence, gives the request back to Triton, and sends the outputs, or why there are none.
  //
  // A client that is quick sends the next step of a sequence as soon as it has the answer, and Triton 24.10 crashes now
  // and then where it has two of them: it has that request back first. Others wait for their answer only.
  void finish() noexcept {
    if (compute_end_ == 0) compute_end_ = now();
    if (call_.error != nullptr) {
      Failure found = failure(std::exchange(call_.error, nullptr));
      if (!failure_) failure_ = std::move(found);
    }
    if (session_ != 0) copy_.sequences->give_back(session_, (flags_ & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END) != 0);
    if (response_ == nullptr) ignore(TRITONBACKEND_ResponseNew(&response_, triton_));
    ignore(TRITONBACKEND_ModelInstanceReportStatistics(instance_, triton_, !failed(), begin_, compute_begin_,
                                                       compute_end_, now()));
    if (copy_.method().stateful) release();
    if (response_ != nullptr) {
      TRITONSERVER_Error* const error = failure_ ? TRITONSERVER_ErrorNew(failure_->code, failure_->what()) : nullptr;
      ignore(TRITONBACKEND_ResponseSend(response_, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
      TRITONSERVER_ErrorDelete(error);
    }
    if (!copy_.method().stateful) release();
  }

  uint64_t compute_end() const { return compute_end_; }

 private:
  void read_inputs() {
    const size_t count = copy_.method().input_count;
    inputs_.resize(count);
    pieces_.resize(count);
    for (size_t i = 0; i < count; ++i) read_input(i);
  }

  void read_input(size_t index) {
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
  exportkit_piece read_piece(TRITONBACKEND_Input* input, uint32_t index) const {
    exportkit_piece piece = {};
    const bool on_gpu = copy_.device().device_type == kDLCUDA;
    TRITONSERVER_MemoryType type = on_gpu ? TRITONSERVER_MEMORY_GPU : TRITONSERVER_MEMORY_CPU;
    int64_t device = copy_.device().device_id;
    check(TRITONBACKEND_InputBuffer(input, index, &piece.data, &piece.size, &type, &device));
    piece.device =
        type == TRITONSERVER_MEMORY_GPU ? DLDevice{kDLCUDA, static_cast<int32_t>(device)} : DLDevice{kDLCPU, 0};
    return piece;
  }

  void read_outputs() {
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

  void find_session() {
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

  void keep_session() {
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

  exportkit_session kept_session() {
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

  void place_output(size_t output, int32_t ndim, const int64_t* shape, uint64_t bytes, void** data, DLDevice* device) {
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

  void release() const noexcept { ignore(TRITONBACKEND_RequestRelease(triton_, TRITONSERVER_REQUEST_RELEASE_ALL)); }

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

// An instance of a model, which answers the requests that Triton gives it together.
class Instance {
 public:
  Instance(TRITONBACKEND_ModelInstance* triton, Copy& copy, int64_t rows) : triton_(triton), copy_(copy), rows_(rows) {}

  // Answers and releases each request.
  void execute(std::span<TRITONBACKEND_Request* const> given) {
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

 private:
  void run(std::vector<Request*>& requests, uint64_t compute_begin) {
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
  void report(const std::vector<Request*>& requests, uint64_t begin, uint64_t compute_begin) {
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

  TRITONBACKEND_ModelInstance* const triton_;
  Copy& copy_;
  const int64_t rows_;
};

void check_versions() {
  uint32_t major = 0, minor = 0;
  check(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != TRITONBACKEND_API_VERSION_MAJOR || minor < TRITONBACKEND_API_VERSION_MINOR) {
    throw Failure(TRITONSERVER_ERROR_UNSUPPORTED, "this Triton has the interface of backends ", major, ".", minor,
                  ", exportkit needs 1.19 or a later 1.x: take Triton 24.10 or a later one");
  }
  if (exportkit_abi_version() < EXPORTKIT_ABI_VERSION) {
    throw Failure(TRITONSERVER_ERROR_UNSUPPORTED,
                  "libexportkit_runtime.so is older than this backend: take both of one exportkit");
  }
}

// The backend, a model or an instance, which Triton keeps for us; null if it could not be made.
template <class T, class Owner>
T* kept(TRITONSERVER_Error* (*get)(Owner*, void**), Owner* owner) {
  void* state = nullptr;
  check(get(owner, &state));
  return static_cast<T*>(state);
}

template <class T, class Owner>
void keep(TRITONSERVER_Error* (*set)(Owner*, void*), Owner* owner, std::unique_ptr<T> made) {
  check(set(owner, made.get()));
  made.release();
}

std::string device_of(TRITONBACKEND_ModelInstance* instance) {
  TRITONSERVER_InstanceGroupKind kind = TRITONSERVER_INSTANCEGROUPKIND_AUTO;
  int32_t gpu = 0;
  check(TRITONBACKEND_ModelInstanceKind(instance, &kind));
  check(TRITONBACKEND_ModelInstanceDeviceId(instance, &gpu));
  if (kind == TRITONSERVER_INSTANCEGROUPKIND_GPU) return "cuda:" + std::to_string(gpu);
  return kind == TRITONSERVER_INSTANCEGROUPKIND_CPU ? "cpu" : "auto";
}

template <class F>
TRITONSERVER_Error* guarded(const F& call) noexcept {
  try {
    call();
    return nullptr;
  } catch (...) {
    return caught();
  }
}

}  // namespace
}  // namespace exportkit::triton

using namespace exportkit::triton;

#pragma GCC visibility push(default)
extern "C" {

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  return guarded([&] {
    check_versions();
    keep(TRITONBACKEND_BackendSetState, backend, std::make_unique<Backend>(backend));
    log(TRITONSERVER_LOG_INFO,
        exportkit::concat("exportkit ", exportkit_version(), ", torch ", exportkit_torch_version()));
  });
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  return guarded([&] { delete kept<Backend>(TRITONBACKEND_BackendState, backend); });
}

// One instance, on the device that exportkit chooses: not one for each GPU, as Triton would have.
TRITONSERVER_Error* TRITONBACKEND_GetBackendAttribute(TRITONBACKEND_Backend*,
                                                      TRITONBACKEND_BackendAttribute* attributes) {
  return TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(attributes, TRITONSERVER_INSTANCEGROUPKIND_MODEL, 1,
                                                                 nullptr, 0);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return guarded([&] {
    TRITONBACKEND_Backend* backend = nullptr;
    check(TRITONBACKEND_ModelBackend(model, &backend));
    keep(TRITONBACKEND_ModelSetState, model,
         std::make_unique<Model>(model, *kept<Backend>(TRITONBACKEND_BackendState, backend)));
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return guarded([&] { delete kept<Model>(TRITONBACKEND_ModelState, model); });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  return guarded([&] {
    TRITONBACKEND_Model* triton = nullptr;
    check(TRITONBACKEND_ModelInstanceModel(instance, &triton));
    Model& model = *kept<Model>(TRITONBACKEND_ModelState, triton);
    keep(TRITONBACKEND_ModelInstanceSetState, instance,
         std::make_unique<Instance>(instance, model.copy_on(device_of(instance)), model.rows()));
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  return guarded([&] { delete kept<Instance>(TRITONBACKEND_ModelInstanceState, instance); });
}

// Answers every request, so there is nothing to return an error for.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests, const uint32_t count) {
  return guarded([&] { kept<Instance>(TRITONBACKEND_ModelInstanceState, instance)->execute({requests, count}); });
}

}  // extern "C"
#pragma GCC visibility pop
