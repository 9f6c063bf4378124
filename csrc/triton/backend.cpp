// What Triton calls: a backend that runs exportkit packages through exportkit's C interface.
//
// REPOSITORY/NAME.exportkit/1/ANY.pt2 is a model without any config.pbtxt; REPOSITORY/NAME/1/model.pt2 is one with the
// line `backend: "exportkit"`. All else comes from the package.
#include <memory>

#include "triton/model.h"
#include "triton/request.h"

namespace exportkit::triton {
namespace {

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
