// Operators as other people's libraries register them: with schemas that torch prints and cannot read back, with
// kernels for a schema that Python defines, and in the way of before TORCH_LIBRARY.
#include <ATen/ATen.h>
#include <ATen/core/op_registration/op_registration.h>
#include <torch/library.h>

#include <string_view>

namespace {

at::Tensor twice(const at::Tensor& x) { return x * 2; }

void double_in_place(at::Tensor& x) { x.mul_(2); }

void double_all(at::TensorList xs) {
  for (const at::Tensor& x : xs) x.mul_(2);
}

at::Tensor converted(const at::Tensor& x, at::ScalarType dtype, at::Layout, at::MemoryFormat, at::Device device,
                     std::string_view how) {
  return x.to(device, dtype) + double(how.size());
}

// Writes into x, as FlashAttention 3 says of its queries, and leaves some results undefined, as it does.
std::vector<at::Tensor> parts(at::Tensor x, const at::Tensor& y) {
  x.add_(1);
  return {x * y, at::Tensor(), x.sum(), at::Tensor()};
}

// Has a list of what else there is to say: nothing.
std::vector<at::Tensor> increased(at::Tensor x) {
  x.add_(1);
  return {};
}

// Writes where the caller wants it, if he does.
at::Tensor halved(const at::Tensor& x, const std::optional<at::Tensor>& out) { return out ? out->copy_(x / 2) : x / 2; }

}  // namespace

TORCH_LIBRARY(foreign, m) {
  m.def("double_(Tensor! x) -> ()");
  m.def("parts(Tensor! x, Tensor y) -> Tensor[]");
  m.def("increased(Tensor! x) -> Tensor[]");
  m.def("halved(Tensor x, Tensor(a!)? out=None) -> Tensor");
  m.def("double_all_(Tensor![] xs) -> ()");
  m.def(
      "converted(Tensor x, ScalarType dtype=float64, Layout layout=strided, "
      "MemoryFormat format=contiguous_format, Device device=\"cpu\", str how=\"gr\xc3\xb6\xc3\x9f"
      "e\") -> Tensor");
}

TORCH_LIBRARY_IMPL(foreign, CPU, m) {
  m.impl("double_", &double_in_place);
  m.impl("parts", &parts);
  m.impl("increased", &increased);
  m.impl("halved", &halved);
  m.impl("double_all_", &double_all);
  m.impl("converted", &converted);
}

TORCH_LIBRARY_IMPL(foreign_python, CPU, m) { m.impl("twice", &twice); }

const auto registered = c10::RegisterOperators().op(
    "foreign_old::twice(Tensor x) -> Tensor",
    c10::RegisterOperators::options().kernel<decltype(twice), &twice>(c10::DispatchKey::CPU));
