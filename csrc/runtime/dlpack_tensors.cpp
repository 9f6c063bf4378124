#include "runtime/dlpack_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdint>

#include "exportkit/runtime.h"
#include "package/errors.h"
#include "package/text.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

constexpr const char* kTooLarge = "is too large for memory";
constexpr int32_t kMostDimensions = 64;  // of torch's iterators

DLDataType element(const Dtype& dtype) {
  return {static_cast<uint8_t>(dtype.dlpack), static_cast<uint8_t>(8 * c10::elementSize(dtype.type)), 1};
}

[[noreturn]] void refuse(const std::string& name, const std::string& what, const std::string& hint = {}) {
  throw Error(errors::kInput, "`" + name + "` " + what, hint);
}

// Sizes and strides in elements, and the number of elements.
struct Layout {
  std::vector<int64_t> sizes, strides;
  int64_t count;
};

// Row-major where none are given. Those of a tensor without elements say nothing.
std::vector<int64_t> strides_of(const DLTensor& given, const std::vector<int64_t>& sizes, int64_t count) {
  if (given.strides != nullptr && count > 0) return {given.strides, given.strides + given.ndim};
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t axis = sizes.size(); axis-- > 1;) strides[axis - 1] = count > 0 ? strides[axis] * sizes[axis] : 0;
  return strides;
}

Layout layout_of(const DLTensor& given, size_t element_size, const std::string& name) {
  if (given.ndim < 0 || given.ndim > kMostDimensions) {
    refuse(name, concat("must have 0 to ", kMostDimensions, " dimensions, got ", given.ndim));
  }
  if (given.ndim > 0 && given.shape == nullptr) refuse(name, "has no shape: the pointer is null");
  Layout layout{{given.shape, given.shape + given.ndim}, {}, 1};
  const auto refuse_layout = [&](const std::string& what) {
    refuse(name, what + ", shape " + shape_text(layout.sizes));
  };
  for (const int64_t size : layout.sizes) {
    if (size < 0) refuse_layout("has a negative size");
    // torch multiplies the others of an empty tensor, too.
    if (__builtin_mul_overflow(layout.count, std::max<int64_t>(size, 1), &layout.count)) refuse_layout(kTooLarge);
  }
  if (std::count(layout.sizes.begin(), layout.sizes.end(), 0) > 0) layout.count = 0;
  layout.strides = strides_of(given, layout.sizes, layout.count);
  __int128 last = 0;  // the offset of the last element
  for (size_t axis = 0; layout.count > 0 && axis < layout.sizes.size(); ++axis) {
    if (layout.strides[axis] < 0) {
      refuse(name, "has negative strides " + shape_text(layout.strides), "Copy it to a row-major tensor.");
    }
    last += static_cast<__int128>(layout.sizes[axis] - 1) * layout.strides[axis];
  }
  if ((last + 1) * static_cast<__int128>(element_size) > INT64_MAX) refuse_layout(kTooLarge);
  return layout;
}

void* data_of(const DLTensor& given, size_t element_size, const std::string& name) {
  if (given.data == nullptr) refuse(name, "has no data: the pointer is null");
  char* data = static_cast<char*>(given.data) + given.byte_offset;
  if (const auto address = reinterpret_cast<uintptr_t>(data); address % element_size != 0) {
    refuse(name,
           "must be aligned to its elements of " + std::to_string(element_size) + " bytes, got an address that is " +
               std::to_string(address % element_size) + " bytes beyond",
           "Copy it to memory that is aligned.");
  }
  return data;
}

// What a lent tensor refers to.
struct Lent {
  DLManagedTensorVersioned managed;
  at::Tensor tensor;
  std::vector<int64_t> sizes, strides;
};

}  // namespace

DLDataType dl_dtype(at::ScalarType dtype) {
  for (const Dtype& known : kDtypes) {
    if (known.type == dtype) return element(known);
  }
  throw Error(errors::kUsage, "DLPack has no dtype for " + dtype_name(dtype));
}

DLDevice dl_device(c10::Device device) {
  return {device.is_cuda() ? kDLCUDA : kDLCPU, device.is_cuda() ? device.index() : 0};
}

at::ScalarType dtype_of(const DLDataType& given, const std::string& name) {
  for (const Dtype& dtype : kDtypes) {
    const DLDataType known = element(dtype);
    if (known.code == given.code && known.bits == given.bits && known.lanes == given.lanes) return dtype.type;
  }
  refuse(name, "has a dtype that no package takes: DLPack's code " + std::to_string(given.code) + " with " +
                   std::to_string(given.bits) + " bits and " + std::to_string(given.lanes) + " lanes");
}

c10::Device device_of(const DLDevice& given, const std::string& name, c10::Device device) {
  if (given.device_type == kDLCPU || given.device_type == kDLCUDAHost) return c10::Device(c10::kCPU);
  const bool is_cuda = given.device_type == kDLCUDA || given.device_type == kDLCUDAManaged;
  if (is_cuda && device.is_cuda() && given.device_id == device.index()) return device;
  const std::string kind = is_cuda ? "cuda" : "DLPack's device type " + std::to_string(given.device_type);
  refuse(name, concat("must be on ", device.str(), ", where the model is; got one on ", kind, ":", given.device_id),
         "Copy it there, or open the package with another device.");
}

std::pair<std::vector<int64_t>, uint64_t> row_major(const int64_t* shape, int32_t ndim, at::ScalarType dtype,
                                                    const std::string& name) {
  DLTensor given{};
  given.ndim = ndim, given.shape = const_cast<int64_t*>(shape);
  Layout layout = layout_of(given, c10::elementSize(dtype), name);
  return {std::move(layout.sizes), static_cast<uint64_t>(layout.count) * c10::elementSize(dtype)};
}

at::Tensor borrow(const DLTensor* given, const std::string& name, c10::Device device) {
  if (given == nullptr) refuse(name, "must be a tensor, got a null pointer");
  const at::ScalarType dtype = dtype_of(given->dtype, name);
  const c10::Device place = device_of(given->device, name, device);
  const Layout layout = layout_of(*given, c10::elementSize(dtype), name);
  const auto options = at::TensorOptions(dtype).device(place);
  if (layout.count == 0) return at::empty(layout.sizes, options);
  void* data = data_of(*given, c10::elementSize(dtype), name);
  try {
    return at::from_blob(data, layout.sizes, layout.strides, options);
  } catch (const c10::Error& error) {  // such as a pointer that CUDA does not know
    refuse(name, "cannot be read on " + place.str() + ": " + first_line(error.what_without_backtrace()));
  }
}

ManagedTensor lend(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.resolve_conj().resolve_neg();
  auto lent = std::make_unique<Lent>(Lent{{}, plain, plain.sizes().vec(), plain.strides().vec()});
  DLManagedTensorVersioned& managed = lent->managed;
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed.manager_ctx = lent.get();
  managed.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<Lent*>(self->manager_ctx); };
  managed.flags = 0;
  managed.dl_tensor = {plain.numel() == 0 ? nullptr : plain.data_ptr(),
                       dl_device(plain.device()),
                       static_cast<int32_t>(plain.dim()),
                       dl_dtype(plain.scalar_type()),
                       lent->sizes.data(),
                       lent->strides.data(),
                       0};
  return ManagedTensor(&lent.release()->managed);
}

}  // namespace exportkit
