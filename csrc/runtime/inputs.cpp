#include "runtime/inputs.h"

#include <algorithm>

#include "package/text.h"
#include "runtime/dlpack_tensors.h"
#include "runtime/overlaps.h"

namespace exportkit {
namespace {

// torch's CUDA kernels may read 16 bytes at a time from the start of an input, and code for a CPU reads elements at
// multiples of their size. An input that begins elsewhere is copied.
constexpr uintptr_t kCudaAlignment = 16;
constexpr size_t kLargestElement = 16;  // bytes

[[noreturn]] void refuse(const std::string& name, const std::string& what, const std::string& hint = {}) {
  throw Error(errors::kInput, "`" + name + "` " + what, hint);
}

// The bytes from the start of the storage to the end of the last element.
size_t bytes_needed(const at::Tensor& value) {
  if (value.numel() == 0) return 0;
  int64_t last = value.storage_offset();
  for (int64_t axis = 0; axis < value.dim(); ++axis) last += (value.size(axis) - 1) * value.stride(axis);
  return static_cast<size_t>(last + 1) * value.itemsize();
}

void check_dtype(at::ScalarType given, const std::string& name, at::ScalarType dtype) {
  if (given == dtype) return;
  refuse(name, "must be " + dtype_name(dtype) + ", got " + dtype_name(given),
         std::string("`.to(at::k") + c10::toString(dtype) + ")` converts it.");
}

void check_kind(const at::Tensor& value, const std::string& name, at::ScalarType dtype, c10::Device device) {
  if (!value.defined()) refuse(name, "must be a tensor, got an undefined one");
  if (value.layout() != at::kStrided || !value.has_storage()) {
    refuse(name, "must be a dense tensor with data of its own, got layout " + c10::str(value.layout()));
  }
  check_dtype(value.scalar_type(), name, dtype);
  if (value.device() != device) {
    refuse(name, "must be on " + device.str() + ", where the model is; got one on " + value.device().str(),
           "`.to()` moves it, or open the package with another device.");
  }
  if (value.numel() > 0 && value.const_data_ptr() == nullptr) {
    refuse(name, "has no data: its storage was freed, or it only stands in for a tensor");
  }
  if (const auto needed = bytes_needed(value); needed > value.storage().nbytes()) {
    refuse(name,
           "needs " + std::to_string(needed) + " bytes of its storage, which has " +
               std::to_string(value.storage().nbytes()) + ": it was resized since it was made",
           "`.clone()` it before its storage is resized.");
  }
}

bool is_flipped(const at::Tensor& value) { return value.is_neg() || value.is_conj(); }

uintptr_t alignment_of(const at::Tensor& value) { return alignment_on(value.device(), value.itemsize()); }

bool is_unaligned(const at::Tensor& value) {
  return reinterpret_cast<uintptr_t>(value.const_data_ptr()) % alignment_of(value) != 0;
}

// Whether torch would refuse to see the elements as larger ones, such as pairs of floats as complex numbers.
bool begins_within_a_larger(const at::Tensor& value) {
  return static_cast<size_t>(value.storage_offset()) * value.itemsize() % kLargestElement != 0;
}

at::Tensor plain(const at::Tensor& value) {
  // Such views flip a sign when they are read; compiled code would ignore that.
  at::Tensor tensor = is_flipped(value) ? value.resolve_neg().resolve_conj() : value;
  if (!tensor.is_contiguous()) return tensor.contiguous();
  return is_unaligned(tensor) || begins_within_a_larger(tensor) ? tensor.clone() : tensor;
}

// What the call writes must reach the caller, so there can be no copy.
void check_writable(const at::Tensor& value, const std::string& name) {
  constexpr const char* kWhy = ", because the call writes into it";
  constexpr const char* kHint = "Give a contiguous copy, and take what is written from it.";
  if (!value.is_contiguous())
    refuse(name, "must be contiguous, got strides " + shape_text(value.strides()) + kWhy, kHint);
  if (is_flipped(value) || is_unaligned(value)) {
    refuse(name,
           "must begin at a multiple of " + std::to_string(alignment_of(value)) +
               " bytes and be no lazy conjugate or negative" + kWhy,
           kHint);
  }
  if (value.requires_grad()) refuse(name, "requires gradients, and the call writes into it", "Give its `.detach()`.");
}

}  // namespace

Memory memory_of(const at::Tensor& tensor, bool written, std::string name) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto offset = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return {begin, tensor.numel() == 0 ? begin : begin + bytes_needed(tensor) - offset, written, std::move(name)};
}

InputPlan::InputPlan(const Call& call, c10::Device device) : call_(call), device_(device) {
  for (const TensorInput& input : call.inputs) {
    dtypes_.push_back(dtype_of(input.dtype));
    writes_ |= input.written.has_value();
  }
}

std::vector<at::Tensor> InputPlan::prepare(const std::vector<at::Tensor>& inputs, const StateInUse* state) const {
  check_count(call_.inputs, inputs.size());
  std::vector<at::Tensor> prepared;
  prepared.reserve(inputs.size());
  Bound bound = bound_by(state);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TensorInput& expected = call_.inputs[i];
    check_kind(inputs[i], expected.name, dtypes_[i], device_);
    check_shape(inputs[i].sizes(), expected, bound);
    if (expected.written) check_writable(inputs[i], expected.name);
    prepared.push_back(expected.written ? inputs[i] : plain(inputs[i]));
  }
  if (writes_ || state != nullptr) check_memory(inputs, state);
  return prepared;
}

void InputPlan::check(const std::vector<InputShape>& inputs, const StateInUse* state) const {
  check_count(call_.inputs, inputs.size());
  Bound bound = bound_by(state);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dtype(inputs[i].dtype, call_.inputs[i].name, dtypes_[i]);
    check_shape(inputs[i].sizes, call_.inputs[i], bound);
  }
}

InputPlan::Bound InputPlan::bound_by(const StateInUse* state) {
  Bound bound;
  if (state == nullptr) return bound;
  for (const auto& [dimension, size] : state->sizes) bound.emplace(dimension, std::pair(size, "the session"));
  return bound;
}

// Checks a dynamic size against its range and against earlier inputs with the same dimension.
void InputPlan::bind_size(at::IntArrayRef shape, const std::string& name, size_t axis, const Size& size,
                          Bound& bound) const {
  const Dimension& dimension = *std::ranges::find(call_.dimensions, size.dimension, &Dimension::name);
  const __int128 scaled = static_cast<__int128>(shape[axis]) - size.offset;
  const auto number =
      static_cast<int64_t>(scaled / size.scale);  // if a huge offset overflows, this is not a multiple or out of range
  if (scaled != static_cast<__int128>(number) * size.scale || number < dimension.min || number > dimension.max) {
    const auto end = [&](int64_t n) { return std::to_string(size_at(size, n)); };
    refuse(name,
           "must have a size from " + end(dimension.min) + " to " + end(dimension.max) +
               (size.scale > 1 ? ", in steps of " + std::to_string(size.scale) : "") + " in dimension " +
               std::to_string(axis) + " (" + expression(size) + "), got shape " + shape_text(shape),
           "Export with another range (--dynamic) where the model should take it.");
  }
  const auto& [known, source] = bound.try_emplace(size.dimension, number, "`" + name + "`").first->second;
  if (known != number) {
    refuse(name, concat("has ", size.dimension, " = ", number, " by dimension ", axis, " of shape ", shape_text(shape),
                        ", but ", source, " has ", size.dimension, " = ", known, ": they must agree"));
  }
}

void InputPlan::check_shape(at::IntArrayRef shape, const TensorInput& expected, Bound& bound) const {
  if (shape.size() != expected.shape.size()) {
    refuse(expected.name, concat("must have ", expected.shape.size(), " dimensions, got shape ", shape_text(shape)));
  }
  for (size_t axis = 0; axis < expected.shape.size(); ++axis) {
    if (const auto* size = std::get_if<Size>(&expected.shape[axis])) {
      bind_size(shape, expected.name, axis, *size, bound);
    } else if (const int64_t fixed = std::get<int64_t>(expected.shape[axis]); shape[axis] != fixed) {
      refuse(expected.name, "must have size " + std::to_string(fixed) + " in dimension " + std::to_string(axis) +
                                ", got shape " + shape_text(shape));
    }
  }
}

// Refuses memory that is written and used by another input, too.
void InputPlan::check_memory(const std::vector<at::Tensor>& inputs, const StateInUse* state) const {
  std::vector<Memory> given;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TensorInput& input = call_.inputs[i];
    given.push_back(memory_of(inputs[i], input.written.has_value(), "`" + input.name + "`"));
  }
  std::vector<const Memory*> all;
  const auto add = [&](const Memory& memory) {
    if (memory.begin != memory.end) all.push_back(&memory);
  };
  std::for_each(given.begin(), given.end(), add);
  if (state != nullptr) std::for_each(state->memory.begin(), state->memory.end(), add);
  const auto [one, other] = overlapping(all);
  if (one == nullptr) return;
  const auto [written, used] = other->written ? std::pair(other, one) : std::pair(one, other);
  const bool is_state = written->name.front() != '`';
  throw Error(errors::kInput,
              is_state
                  ? used->name + " shares memory with " + written->name
                  : written->name + " shares memory with " + used->name + ", and the call writes into " + written->name,
              "`.clone()` one of them.");
}

uintptr_t alignment_on(c10::Device device, size_t itemsize) {
  return std::max<uintptr_t>(device.is_cuda() ? kCudaAlignment : 1, itemsize);
}

at::ScalarType dtype_of(const std::string& name) {
  for (const Dtype& known : kDtypes) {
    if (name == known.name) return known.type;
  }
  throw Error(errors::kInput, "unknown dtype " + name);
}

std::string dtype_name(at::ScalarType dtype) {
  for (const Dtype& known : kDtypes) {
    if (dtype == known.type) return known.name;
  }
  return c10::toString(dtype);
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::string describe(const at::Tensor& tensor) { return dtype_name(tensor.scalar_type()) + shape_text(tensor.sizes()); }

std::string expression(const Size& size) {
  const std::string scaled = size.scale != 1 ? std::to_string(size.scale) + "*" + size.dimension : size.dimension;
  if (size.offset == 0) return scaled;
  const std::string offset = std::to_string(size.offset);
  return scaled + (size.offset > 0 ? "+" : "") + offset;
}

}  // namespace exportkit
